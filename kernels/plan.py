"""What the quantising part of a kernel is told and the tensors that it writes, by an operator's arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fuse_cache.kernels.codecs import codec
from fuse_cache.kernels.quant_dynamic.op import QUANT_DYNAMIC
from fuse_cache.kernels.quant_dynamic.reference import COLUMN, INVERSE64, PACKED, PER_TOKEN, ROW, TMA_ROWS
from fuse_cache.kernels.quant_fp8_static.op import QUANT_FP8_STATIC
from fuse_cache.kernels.quant_nvfp4.op import QUANT_NVFP4
from fuse_cache.kernels.quant_nvfp4.reference import GROUP, TILE_GROUPS, TILE_ROWS

# The constants of `tl_quantise.store_row_block`, as they are where a kind does not use them.
UNUSED: Final[dict[str, object]] = {
    "KIND": "none",
    "GROUP": 0,
    "LAYOUT": ROW,
    "BOUNDED": False,
    "AMAX_MIN": 0.0,
    "AMAX_MAX": 0.0,
    "SCALE_RULE": "none",
    "DIVISOR": 1.0,
    "FLOOR_SCALE": 0.0,
    "AMAX_DTYPE": "none",
    "SCALE_DTYPE": "none",
    "SCALE_MIN": 0.0,
    "POWER": "none",
    "AMAX_SCALING": "none",
    "GLOBAL_SCALING": "none",
    "TOTAL_SCALING": "none",
    "ZERO_GUARD": "none",
    "NAN_CODE": 0,
    "NAN_SIGN": False,
    "ZERO_SIGN": False,
    "SCALING": "none",
    "SCALED_DTYPE": "none",
    "CLAMP_MIN": 0.0,
    "CLAMP_MAX": 0.0,
    "CODES": "none",
    "CODEC": "none",
    "OVERFLOW": 0,
}


_OVERFLOWING: Final = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})


@dataclass(frozen=True, slots=True)
class Plan:
    """One quantisation: what the kernel reads and writes, and its constants.

    `results` makes the operator's results of the codes and the scales that the kernel has written; `written`
    says which of the two it writes.
    """

    factor: Tensor
    codes: Tensor
    scales: Tensor
    scales_stride: Any
    written: tuple[str, ...]
    results: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
    constants: dict[str, object]


def dtype_name(dtype: torch.dtype | None) -> str:
    """Return the name that kernels know a rounding by."""
    return "none" if dtype is None else str(dtype).removeprefix("torch.")


@functools.cache
def overflow_code(dtype: torch.dtype) -> int:
    """Return what this torch makes of an overflow: of e4m3fn the largest code since 2.13, NaN before."""
    with _disable_current_modes():  # Asked while a graph is traced.
        return int(torch.tensor(65536.0).to(dtype).view(torch.uint8))


def no_quantisation(like: Tensor) -> Plan:
    """Return the plan of a kernel that stores its values as they are. Unused pointers are those of `like`."""
    return Plan(like, like, like, 0, (), lambda codes, scales: (), UNUSED)


def plan_static(like: Tensor, shape: tuple[Any, ...], target: str, arguments: tuple[Any, ...]) -> Plan:
    """Plan `quant_fp8_static`, of which `arguments` are all but x."""
    scale, scaling, scaled_dtype, clamp_min, clamp_max, dtype = arguments
    codes = like.new_empty(shape, dtype=torch.uint8)
    constants = _codes(target, scaling, scaled_dtype, clamp_min, clamp_max, dtype)
    constants |= {"KIND": "static"}
    return Plan(scale, codes, like, 0, ("codes",), lambda codes, _: (codes.view(dtype),), constants)


def plan_dynamic(like: Tensor, shape: tuple[Any, ...], target: str, arguments: tuple[Any, ...]) -> Plan:
    """Plan `quant_dynamic` per token or per group."""
    bound, group, amax_min, amax_max, scale_rule, divisor, scale_dtype, scale_min, power, *rest = arguments
    scaling, scaled_dtype, clamp_min, clamp_max, dtype, layout = rest
    codes = like.new_empty(shape, dtype=torch.int8 if dtype == torch.int8 else torch.uint8)
    constants = _codes(target, scaling, scaled_dtype, clamp_min, clamp_max, dtype) | {
        "KIND": "token" if group == PER_TOKEN else "group",
        "GROUP": group,
        "LAYOUT": layout,
        "BOUNDED": bound is not None,
        "AMAX_MIN": amax_min or 0.0,
        "AMAX_MAX": amax_max or 0.0,
        "SCALE_RULE": scale_rule,
        "DIVISOR": float(divisor),
        "FLOOR_SCALE": divisor / amax_min if scale_rule == INVERSE64 and amax_min else 0.0,
        "SCALE_DTYPE": dtype_name(scale_dtype),
        "SCALE_MIN": scale_min or 0.0,
        "POWER": power,
    }
    stride: Any = 0
    if group == PER_TOKEN:
        scales = like.new_empty((*shape[:-1], 1), dtype=torch.float32)
    elif layout == ROW:
        scales = like.new_empty((*shape[:-1], shape[-1] // group), dtype=torch.float32)
    else:
        tokens, groups = shape[0], shape[-1] // group
        columns = (groups + 3) // 4 if layout == PACKED else groups
        stride = tokens if layout == COLUMN else (tokens + TMA_ROWS - 1) // TMA_ROWS * TMA_ROWS
        scales = like.new_empty((columns, stride), dtype=torch.int32 if layout == PACKED else torch.float32)

    def results(codes: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
        if layout != ROW:
            scales = (scales if layout == COLUMN else scales[:, : shape[0]]).t()
        return codes if dtype == torch.int8 else codes.view(dtype), scales

    factor = like if bound is None else bound
    return Plan(factor, codes, scales, stride, ("codes", "scales"), results, constants)


def plan_nvfp4(like: Tensor, shape: tuple[Any, ...], target: str, arguments: tuple[Any, ...]) -> Plan:
    """Plan `quant_nvfp4`."""
    global_scale, amax_scaling, amax_dtype, global_scaling, scale_min, *rest = arguments
    total_scaling, scaling, zero_guard, nan_code, nan_sign, zero_sign, swizzled = rest
    codes = like.new_empty((*shape[:-1], shape[-1] // 2), dtype=torch.uint8)
    groups = shape[-1] // GROUP
    padded = (shape[0] + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    size = (padded, -(-groups // TILE_GROUPS) * TILE_GROUPS) if swizzled else (*shape[:-1], groups)
    scales = like.new_empty(size, dtype=torch.uint8)
    constants = UNUSED | {
        "KIND": "nvfp4",
        "LAYOUT": "swizzled" if swizzled else ROW,
        "AMAX_SCALING": amax_scaling,
        "AMAX_DTYPE": dtype_name(amax_dtype),
        "GLOBAL_SCALING": global_scaling,
        "TOTAL_SCALING": total_scaling,
        "SCALE_MIN": scale_min or 0.0,
        "SCALING": scaling,
        "ZERO_GUARD": zero_guard,
        "NAN_CODE": nan_code,
        "NAN_SIGN": nan_sign,
        "ZERO_SIGN": zero_sign,
        "CODEC": codec(target, "float8_e4m3fn") or "software",
    }
    factor = like if global_scale is None else global_scale
    stride = padded if swizzled else 0
    return Plan(factor, codes, scales, stride, ("codes", "scales"), _nvfp4_results, constants)


def _nvfp4_results(codes: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    return codes, scales.view(torch.float8_e4m3fn)


def _codes(
    target: str,
    scaling: str,
    scaled_dtype: torch.dtype,
    clamp_min: float | None,
    clamp_max: float | None,
    dtype: torch.dtype,
) -> dict[str, object]:
    name = dtype_name(dtype)
    is_bounded = clamp_max is not None and clamp_min is not None
    return UNUSED | {
        "SCALING": scaling,
        "SCALED_DTYPE": dtype_name(scaled_dtype),
        "CLAMP_MIN": clamp_min or 0.0,
        "CLAMP_MAX": clamp_max or 0.0,
        "CODES": name,
        "CODEC": codec(target, name) or "none",
        # Within bounds nothing overflows, and kernels that differ in nothing else are one.
        "OVERFLOW": 0x7E if is_bounded or dtype not in _OVERFLOWING else overflow_code(dtype),
    }


PLANS: Final[dict[object, Callable[..., Plan]]] = {
    QUANT_FP8_STATIC: plan_static,
    QUANT_DYNAMIC: plan_dynamic,
    QUANT_NVFP4: plan_nvfp4,
}
