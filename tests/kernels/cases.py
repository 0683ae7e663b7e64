"""The operators with every set of attributes that the tests of references, shapes and kernels run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fuse_cache.kernels.act_and_mul.op import ACT_AND_MUL
from fuse_cache.kernels.act_and_mul.reference import GELU, GELU_TANH, SILU, SWISH
from fuse_cache.kernels.fused_add_rms_norm.op import FUSED_ADD_RMS_NORM
from fuse_cache.kernels.fused_quant.op import FUSED
from fuse_cache.kernels.quant_dynamic.op import QUANT_DYNAMIC
from fuse_cache.kernels.quant_dynamic.reference import (
    CLAMPED_POWER,
    COLUMN,
    COLUMN_TMA,
    EXACT_POWER,
    INVERSE,
    INVERSE64,
    LOG2_POWER,
    NO_POWER,
    PACKED,
    PER_TOKEN,
    ROW,
)
from fuse_cache.kernels.quant_fp8_static.op import QUANT_FP8_STATIC
from fuse_cache.kernels.quant_nvfp4.op import QUANT_NVFP4
from fuse_cache.kernels.quant_nvfp4.reference import BITS, GUARD_RECIPROCALS, GUARD_SCALE, NO_GUARD
from fuse_cache.kernels.rms_norm.op import RMS_NORM
from fuse_cache.kernels.scaling import DIVIDE, MULTIPLY, RECIPROCAL, RECIPROCALS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FN, FNUZ, E5M2 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2
MIN_SCALE = 1.0 / (448.0 * 512.0)


@dataclass(frozen=True)
class Case:
    """An operator and its attributes. `tensors(tokens, hidden, dtype)` makes what it reads."""

    name: str
    operator: OpOverload
    tensors: Callable[[int, int, torch.dtype], tuple[Tensor | None, ...]]
    attributes: Callable[[torch.dtype], tuple[Any, ...]]
    group: int = 0  # Rows must be multiples of it.
    tells_nan_sign: bool = False  # The sign of a NaN, which IEEE 754 leaves open, is seen in its codes.

    def arguments(self, tokens: int, hidden: int, dtype: torch.dtype = BF16) -> tuple[Any, ...]:
        """Return all arguments for tensors of this many rows and columns."""
        return (*self.tensors(tokens, hidden, dtype), *self.attributes(dtype))

    def width(self, hidden: int) -> int:
        """Return the number of columns, no less than `hidden`, that the group divides."""
        return hidden if self.group == 0 else -(-hidden // self.group) * self.group


def rows(tokens: int, hidden: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return rows of which each is larger than the one before, so that their scales differ."""
    generator = torch.Generator().manual_seed(seed * 7919 + hidden)
    value = torch.randn(tokens, hidden, generator=generator)
    return (value * torch.linspace(0.5, 4.0, max(tokens, 1))[:tokens, None]).to(dtype)


def _norm(weight_dtype: torch.dtype | None = None, weighted: bool = True) -> Callable[..., Any]:
    def tensors(tokens: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        weight = rows(1, hidden, weight_dtype or dtype, 1)[0] if weighted else None
        return rows(tokens, hidden, dtype), weight

    return tensors


def _add_norm(residual_dtype: torch.dtype | None = None) -> Callable[..., Any]:
    def tensors(tokens: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        residual = rows(tokens, hidden, residual_dtype or dtype, 2)
        return rows(tokens, hidden, dtype), residual, rows(1, hidden, dtype, 1)[0]

    return tensors


def _two(tokens: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    # Two halves of a wider tensor: rows are further apart than they are long.
    both = rows(tokens, 2 * hidden + 32, dtype)
    return both[:, 16 : 16 + hidden], both[:, hidden + 16 : 2 * hidden + 16]


def _halves(tokens: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    return rows(tokens, 2 * hidden, dtype), None


PRODUCER_CASES = (
    Case("norm_llama", RMS_NORM, _norm(), lambda t: (1e-6, 0.0, None, t, None)),
    Case("norm_torch", RMS_NORM, _norm(), lambda t: (1e-5, 0.0, None, None, t)),
    Case("norm_gemma", RMS_NORM, _norm(), lambda t: (1e-6, 1.0, FP32, None, t)),
    Case("norm_fp32_weight", RMS_NORM, _norm(FP32), lambda t: (1e-6, 0.0, None, t, t)),
    Case("norm_unweighted", RMS_NORM, _norm(None, False), lambda t: (1e-6, 0.0, None, t, None)),
    Case("add_norm_rounded", FUSED_ADD_RMS_NORM, _add_norm(), lambda t: (1e-6, 0.0, None, t, None, t, True)),
    Case("add_norm_exact", FUSED_ADD_RMS_NORM, _add_norm(), lambda t: (1e-6, 0.0, None, t, None, t, False)),
    Case(
        "add_norm_fp32_residual",
        FUSED_ADD_RMS_NORM,
        _add_norm(FP32),
        lambda t: (1e-6, 0.0, None, None, t, FP32, True),
    ),
    Case("silu_rounded", ACT_AND_MUL, _two, lambda t: (SILU, None, t, None)),
    Case("silu_exact_halves", ACT_AND_MUL, _halves, lambda t: (SILU, None, None, t)),
    Case("silu_never_rounded", ACT_AND_MUL, _halves, lambda t: (SILU, None, None, None)),
    Case("swish_rounded_sigmoid", ACT_AND_MUL, _two, lambda t: (SWISH, t, t, None)),
    Case("gelu", ACT_AND_MUL, _two, lambda t: (GELU, None, t, None)),
    Case("gelu_tanh_halves", ACT_AND_MUL, _halves, lambda t: (GELU_TANH, None, t, None)),
)


def _one(tokens: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    return rows(tokens, hidden, dtype), torch.tensor(0.0371)


def _global(value: float | None) -> Callable[..., Any]:
    def tensors(tokens: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        return rows(tokens, hidden, dtype), None if value is None else torch.tensor(value)

    return tensors


def _bound(value: float | None) -> Callable[..., Any]:
    def tensors(tokens: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        return rows(tokens, hidden, dtype), None if value is None else torch.tensor([value])

    return tensors


def _group(name: str, size: int, layout: str, power: str = NO_POWER, scaling: str = RECIPROCAL) -> Case:
    attributes = (size, 1e-10, None, DIVIDE, 448.0, None, None, power)
    codes = (scaling, FP32, -448.0, 448.0, FN, layout)
    return Case(name, QUANT_DYNAMIC, _bound(None), lambda t: (*attributes, *codes), size)


def _nvfp4(name: str, *attributes: Any, factor: float | None = 97.3) -> Case:
    nan_sign = bool(attributes[-3])
    return Case(name, QUANT_NVFP4, _global(factor), lambda t: attributes, 16, nan_sign)


# total_scaling, scaling, zero_guard, nan_code, nan_sign, zero_sign
_CODED_AS_CUDA = (RECIPROCAL, RECIPROCAL, GUARD_SCALE, 0, False, True)
_CODED_GUARDED = (RECIPROCAL, RECIPROCAL, GUARD_RECIPROCALS, 7, True, False)
_CODED_BY_BITS = (MULTIPLY, DIVIDE, NO_GUARD, BITS, True, True)

QUANTISER_CASES = (
    Case("static", QUANT_FP8_STATIC, _one, lambda t: (RECIPROCAL, FP32, -448.0, 448.0, FN)),
    Case("static_rounded", QUANT_FP8_STATIC, _one, lambda t: (DIVIDE, t, -448.0, 448.0, FN)),
    Case("static_unclamped", QUANT_FP8_STATIC, _one, lambda t: (DIVIDE, FP32, None, None, FN)),
    Case("static_fnuz", QUANT_FP8_STATIC, _one, lambda t: (MULTIPLY, FP32, -240.0, 240.0, FNUZ)),
    Case(
        "token",
        QUANT_DYNAMIC,
        _bound(None),
        lambda t: (
            *(PER_TOKEN, None, None, DIVIDE, 448.0, None, MIN_SCALE, NO_POWER),
            *(DIVIDE, FP32, -448.0, 448.0, FN, ROW),
        ),
    ),
    Case(
        "token_bound",
        QUANT_DYNAMIC,
        _bound(3.0),
        lambda t: (
            *(PER_TOKEN, None, 4.0, MULTIPLY, 1 / 448, None, MIN_SCALE, NO_POWER),
            *(RECIPROCAL, FP32, -448.0, 448.0, FN, ROW),
        ),
    ),
    Case(
        "token_rounded_scale",
        QUANT_DYNAMIC,
        _bound(None),
        lambda t: (
            *(PER_TOKEN, None, None, DIVIDE, 448.0, t, None, NO_POWER),
            *(DIVIDE, FP32, -448.0, 448.0, FN, ROW),
        ),
    ),
    Case(
        "token_inverse_fnuz",
        QUANT_DYNAMIC,
        _bound(None),
        lambda t: (
            *(PER_TOKEN, 1e-12, None, INVERSE, 240.0, None, None, NO_POWER),
            *(MULTIPLY, FP32, -240.0, 240.0, FNUZ, ROW),
        ),
    ),
    Case(
        "token_inverse64",
        QUANT_DYNAMIC,
        _bound(None),
        lambda t: (
            *(PER_TOKEN, 1e-12, None, INVERSE64, 448.0, None, None, NO_POWER),
            *(MULTIPLY, FP32, -448.0, 448.0, FN, ROW),
        ),
    ),
    Case(
        "token_int8",
        QUANT_DYNAMIC,
        _bound(None),
        lambda t: (
            *(PER_TOKEN, None, None, DIVIDE, 127.0, None, 1e-7, NO_POWER),
            *(RECIPROCAL, FP32, -128.0, 127.0, torch.int8, ROW),
        ),
    ),
    # As torchao: scale, reciprocal and scaled value are rounded to the dtype of the values.
    Case(
        "token_int8_narrow",
        QUANT_DYNAMIC,
        _bound(None),
        lambda t: (
            *(PER_TOKEN, None, None, DIVIDE, 127.0, None if t == FP32 else t, 2**-17, NO_POWER),
            *(RECIPROCALS[t], t, -127.0, 127.0, torch.int8, ROW),
        ),
    ),
    _group("group128", 128, ROW),
    _group("group64_divide", 64, ROW, scaling=DIVIDE),
    _group("group128_column", 128, COLUMN),
    _group("group64_tma", 64, COLUMN_TMA),
    _group("group128_ue8m0", 128, ROW, EXACT_POWER),
    _group("group64_ue8m0_tma", 64, COLUMN_TMA, LOG2_POWER),
    _group("group128_packed", 128, PACKED, EXACT_POWER),
    _group("group64_packed", 64, PACKED, EXACT_POWER),
    _nvfp4("nvfp4_swizzled", RECIPROCAL, None, MULTIPLY, None, *_CODED_AS_CUDA, True),
    _nvfp4("nvfp4_linear", RECIPROCAL, None, MULTIPLY, -448.0, *_CODED_GUARDED, False),
    _nvfp4("nvfp4_divide_swizzled", DIVIDE, BF16, DIVIDE, 2.0**-6, *_CODED_BY_BITS, True, factor=0.0173),
    _nvfp4("nvfp4_no_global", DIVIDE, None, "none", 2.0**-9, "none", *_CODED_BY_BITS[1:], False, factor=None),
    Case("static_e5m2", QUANT_FP8_STATIC, _one, lambda t: (DIVIDE, FP32, -57344.0, 57344.0, E5M2)),
    Case("e5m2_unclamped", QUANT_FP8_STATIC, _one, lambda t: (RECIPROCAL, t, None, None, E5M2)),
    _group("group128_clamped_power", 128, ROW, CLAMPED_POWER),
)


def fused_case(producer: Case, quantiser: Case, keep: bool) -> Case:
    """Return the fused operator of both, which reads what both read."""
    operator, fused = FUSED[producer.operator, quantiser.operator, keep]
    num_producer, num_quantiser = fused.producer.num_tensors, fused.quantiser.num_tensors

    def tensors(tokens: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        mine, others = producer.tensors(tokens, hidden, dtype), quantiser.tensors(tokens, hidden, dtype)
        return (*mine[:num_producer], *others[1:num_quantiser])

    def attributes(dtype: torch.dtype) -> tuple[Any, ...]:
        return (*producer.attributes(dtype), *quantiser.attributes(dtype))

    return Case(f"{producer.name}-{quantiser.name}", operator, tensors, attributes, quantiser.group)
