"""Why a kernel cannot take the place of an operator, in words for the report; None when it can.

Asked with fake tensors while compiling: adds no guard, and a size that is not known is not assumed.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fuse_cache.kernels.act_and_mul.op import ACT_AND_MUL
from fuse_cache.kernels.codecs import CODECS, E2M1, E4M3FN, INT8, codec
from fuse_cache.kernels.fused_quant.op import FUSED, PRODUCERS, QUANTISERS
from fuse_cache.kernels.quant_dynamic.op import QUANT_DYNAMIC
from fuse_cache.kernels.quant_dynamic.reference import INVERSE64, PER_TENSOR, PER_TOKEN
from fuse_cache.kernels.quant_fp8_static.op import QUANT_FP8_STATIC

# A norm holds its row in registers: 32 values a thread at 16 warps.
MAX_NORM_WIDTH: Final = 16384
GROUPS: Final = (32, 64, 128)  # Groups are rows of a block, so powers of two.
_FLOATS: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})


def obstacle(operator: OpOverload, arguments: tuple[Any, ...], target: str) -> str | None:
    """Say why the kernel cannot run this call on "sm_90" or the like."""
    if target not in CODECS:
        return f"there are no kernels for {target}"
    if operator in PRODUCERS:
        return _of_producer(operator, arguments)
    if operator in QUANTISERS:
        x, *rest = arguments
        return _of_rows(x) or _of_quantiser(operator, tuple(rest), x.shape[-1], target)
    for (producer, quantiser, _), (fused, parts) in FUSED.items():
        if fused == operator:
            mine, others = parts.split(arguments)
            halves = 2 if producer == ACT_AND_MUL and mine[1] is None else 1
            width = mine[0].shape[-1] // halves
            return _of_producer(producer, mine) or _of_quantiser(quantiser, others, width, target)
    return f"{operator} has no kernel"


def _of_rows(x: Tensor) -> str | None:
    """Say why rows of x cannot be addressed by one stride, or its result is not laid out as rows."""
    if x.dtype not in _FLOATS:
        return f"there is no kernel for {x.dtype}"
    if x.dim() == 0 or not isinstance(x.shape[-1], int):
        return "the width of a row is not known"
    if x.shape[-1] == 0 or not statically_known_true(x.stride(-1) == 1):
        return "the values of a row are not neighbours in memory"
    if x.dim() > 1 and not statically_known_true(x.stride(-2) >= x.shape[-1]):
        return "rows overlap in memory"
    for dim in range(x.dim() - 2):
        if not statically_known_true(x.stride(dim) == x.stride(dim + 1) * x.shape[dim + 1]):
            return "rows are not evenly spaced in memory"
    return None


def _of_producer(operator: OpOverload, arguments: tuple[Any, ...]) -> str | None:
    tensors = arguments[: PRODUCERS[operator].num_tensors]
    x, *others = tensors
    found = _of_rows(x)
    if found is not None:
        return found
    if operator != ACT_AND_MUL:
        weight = others.pop()
        if x.shape[-1] > MAX_NORM_WIDTH:
            return f"a row of {x.shape[-1]} is longer than {MAX_NORM_WIDTH}"
        if weight is not None and (weight.dtype not in _FLOATS or weight.stride() != (1,)):
            return f"there is no kernel for weights of {weight.dtype}, strides {weight.stride()}"
    elif others[0] is None and x.shape[-1] % 2 != 0:
        return f"{x.shape[-1]} columns have no two halves"
    for other in others:
        if other is None:
            continue
        same = len(other.shape) == len(x.shape) and all(
            statically_known_true(a == b) for a, b in zip(other.shape, x.shape, strict=True)
        )
        if not same:
            return "both operands must have the same shape"
        if (found := _of_rows(other)) is not None:
            return found
    return None


def _of_quantiser(operator: OpOverload, arguments: tuple[Any, ...], width: int, target: str) -> str | None:
    if operator not in (QUANT_DYNAMIC, QUANT_FP8_STATIC):
        if width % 16 != 0:
            return f"a row of {width} is no multiple of the group of 16"
        return next((_missing(target, kind) for kind in (E2M1, E4M3FN) if codec(target, kind) is None), None)
    *_, clamp_min, clamp_max, dtype = arguments[:-1] if operator == QUANT_DYNAMIC else arguments
    name = str(dtype).removeprefix("torch.")
    if codec(target, name) is None:
        return _missing(target, name)
    if (clamp_min is not None and clamp_min >= 0) or (clamp_max is not None and clamp_max <= 0):
        return f"bounds of {clamp_min} and {clamp_max} do not lie around 0"
    if name == INT8 and not all(isinstance(b, float) and b.is_integer() for b in (clamp_min, clamp_max)):
        return f"int8 needs bounds that are integers, not {clamp_min} and {clamp_max}"
    return _of_scales(arguments, width) if operator == QUANT_DYNAMIC else None


def _of_scales(arguments: tuple[Any, ...], width: int) -> str | None:
    _, group, _, amax_max, scale_rule, *_ = arguments
    if group == PER_TENSOR:
        return "one scale for the tensor depends on all its rows"
    if group != PER_TOKEN and (group not in GROUPS or width % group != 0):
        return f"a row of {width} is no multiple of the group of {group}, or that is none of {GROUPS}"
    if scale_rule == INVERSE64 and amax_max is not None and _float32(amax_max) != amax_max:
        return f"the bound {amax_max} is no float32"
    return None


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _missing(target: str, codes: str) -> str:
    return f"{target} has no kernel for {codes}"
