"""Dynamic quantisation in plain PyTorch: the truth."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from fuse_cache.kernels.scaling import DIVIDE, MULTIPLY, encode, zeros_after

# `group`: how many neighbours of a row share a scale.
PER_TENSOR: Final = -1
PER_TOKEN: Final = 0

# `scale_rule`, beside DIVIDE (amax / divisor) and MULTIPLY (amax * divisor). The last two give the reciprocal
# of what dequantises.
INVERSE: Final = "inverse"  # (1 / amax) * divisor: how PyTorch computes number / tensor
INVERSE64: Final = "inverse64"  # the same, bounds included, in float64, then rounded to float32
SCALE_RULES: Final = (DIVIDE, MULTIPLY, INVERSE, INVERSE64)

# `power_of_two`: how scales become powers of two (ue8m0), never smaller.
NO_POWER: Final = "none"
EXACT_POWER: Final = "exact"  # by the bits: the next power of two, powers of two stay
CLAMPED_POWER: Final = "clamped"  # the same, exponents 1 to 254: 0 gives 2^-126, infinity and NaN 2^127
MASKED_POWER: Final = "masked"  # (bits + mantissa's) & exponent's, whatever comes of NaN: 0 of most
LOG2_POWER: Final = "log2"  # exp2(ceil(log2(scale))) in float32: log2 may round to an integer, then smaller
POWERS: Final = (NO_POWER, EXACT_POWER, CLAMPED_POWER, MASKED_POWER, LOG2_POWER)

# `layout` of the scales of T tokens and G groups.
ROW: Final = "row"  # [..., G] contiguous
COLUMN: Final = "column"  # [T, G] with strides (1, T)
COLUMN_TMA: Final = "column_tma"  # [T, G] with strides (1, T rounded up to 4): columns start at 16 bytes
PACKED: Final = "packed"  # int32 [T, G / 4 rounded up], strides as COLUMN_TMA, 4 exponents each
LAYOUTS: Final = (ROW, COLUMN, COLUMN_TMA, PACKED)
TMA_ROWS: Final = 4  # TMA wants 16 bytes: 4 float32 or 4 packed int32.

_EXPONENT: Final = 0x7F800000
_MANTISSA: Final = 0x007FFFFF
_MAGNITUDE: Final = 0x7FFFFFFF


def quant_dynamic(
    x: Tensor,
    bound: Tensor | None,
    group: int,
    amax_min: float | None,
    amax_max: float | None,
    scale_rule: str,
    divisor: float,
    scale_dtype: torch.dtype | None,
    scale_min: float | None,
    power_of_two: str,
    scaling: str,
    scaled_dtype: torch.dtype,
    clamp_min: float | None,
    clamp_max: float | None,
    dtype: torch.dtype,
    layout: str,
) -> tuple[Tensor, Tensor]:
    """Return the codes of x, [..., H] in `dtype`, and the scales, float32 or packed int32.

    x is [..., H] in bfloat16, float16 or float32; `bound` is float32 with one element or None. In this order,
    in float32: amax = the largest |x| of the group; at least `amax_min`; at most `amax_max` and `bound`; the
    scale by `scale_rule` from amax and `divisor` (448.0 for e4m3fn); rounded to `scale_dtype` (None: as it
    is); at least `scale_min`; a power of two by `power_of_two`. Codes are those of `scaling.encode` with this
    scale; MULTIPLY goes with the inverse rules. A None is a step that the graph lacks. NaN in a group makes
    its scale NaN.

    Scales are [..., 1] per token and [] per tensor; per group their shape and strides are those of `layout`,
    and x is [T, H] unless it is ROW. Bytes of PACKED: the exponent of the scale (its float32 bits >> 23, one
    more if the mantissa is not 0); the first of four groups in the low byte, what pads is 0.

    Raises:
        ValueError: H is no multiple of `group`, or the layout does not go with the group or the shape.
    """
    if layout != ROW and (group <= 0 or x.dim() != 2):
        raise ValueError(f"layout {layout} is for groups of a [T, H] tensor, not {group} of {x.dim()} dims")
    scales = _scales(_amax(x, group), bound, amax_min, amax_max, scale_rule, divisor)
    if scale_dtype is not None:
        scales = scales.to(scale_dtype).to(torch.float32)
    if scale_min is not None:
        scales = torch.clamp_min(scales, scale_min)
    scales = to_power_of_two(scales, power_of_two)
    if group > 0:
        groups = x.reshape(*scales.shape, group)
        codes = encode(groups, scales.unsqueeze(-1), scaling, scaled_dtype, clamp_min, clamp_max, dtype)
        codes = codes.flatten(-2)
    else:
        codes = encode(x, scales, scaling, scaled_dtype, clamp_min, clamp_max, dtype)
    return codes, _in_layout(scales, layout)


def _amax(x: Tensor, group: int) -> Tensor:
    """Return the largest absolute value of each group: [], [..., 1] or [..., H / group]."""
    wide = x.to(torch.float32).abs()
    if group == PER_TENSOR:
        return wide.amax()
    if group == PER_TOKEN:
        return wide.amax(-1, keepdim=True)
    if x.shape[-1] % group != 0:
        raise ValueError(f"a row of {x.shape[-1]} is no multiple of the group of {group}")
    return wide.reshape(*x.shape[:-1], x.shape[-1] // group, group).amax(-1)


def _scales(
    amax: Tensor,
    bound: Tensor | None,
    amax_min: float | None,
    amax_max: float | None,
    scale_rule: str,
    divisor: float,
) -> Tensor:
    if scale_rule == INVERSE64:
        amax = amax.to(torch.float64)
    if amax_min is not None:
        amax = torch.clamp_min(amax, amax_min)
    if amax_max is not None:
        amax = torch.clamp_max(amax, amax_max)
    if bound is not None:
        amax = torch.minimum(amax, bound.reshape(()))
    if scale_rule in (INVERSE, INVERSE64):
        return (torch.reciprocal(amax) * divisor).to(torch.float32)
    return amax * divisor if scale_rule == MULTIPLY else amax / divisor


def to_power_of_two(scales: Tensor, power_of_two: str) -> Tensor:
    """Return float32 scales as powers of two by one of `POWERS`.

    Scales are no less than 0. The sign of a NaN, which compiled code may set, counts for nothing.
    """
    if power_of_two == LOG2_POWER:
        return torch.exp2(torch.ceil(torch.log2(scales)))
    if power_of_two == EXACT_POWER:
        bits = scales.view(torch.int32) & _MAGNITUDE
        up = (bits + _MANTISSA) & _EXPONENT
        return torch.where(bits < _EXPONENT, up, bits).view(torch.float32)  # Infinity and NaN stay.
    if power_of_two == MASKED_POWER:
        return (((scales.view(torch.int32) & _MAGNITUDE) + _MANTISSA) & _EXPONENT).view(torch.float32)
    if power_of_two == CLAMPED_POWER:
        bits = scales.view(torch.int32) & _MAGNITUDE
        exponents = (bits >> 23) + ((bits & _MANTISSA) != 0).to(torch.int32)
        return (torch.clamp(exponents, 1, 254) << 23).view(torch.float32)
    return scales


def _in_layout(scales: Tensor, layout: str) -> Tensor:
    """Return the scales of [T, G] in shape and strides of the layout."""
    if layout == ROW:
        return scales
    if layout == COLUMN:
        return scales.t().clone(memory_format=torch.contiguous_format).t()
    tokens, groups = scales.shape
    if layout == PACKED:
        bits = scales.view(torch.int32)
        exponents = (bits >> 23) + ((bits & _MANTISSA) != 0).to(torch.int32)
        exponents = torch.clamp_max(exponents, 255)  # What is larger than 2^127, and NaN.
        first, second, third, fourth = (
            zeros_after(exponents, 4).reshape(tokens, (groups + 3) // 4, 4).unbind(-1)
        )
        scales = first | (second << 8) | (third << 16) | (fourth << 24)
    return zeros_after(scales.t(), TMA_ROWS)[:, :tokens].t()
