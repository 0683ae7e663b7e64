"""NVFP4 quantisation in plain PyTorch: the truth."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from fuse_cache.kernels.scaling import DIVIDE, MULTIPLY, RECIPROCAL, zeros_after

GROUP: Final = 16
TILE_ROWS: Final = 128  # Swizzled scales come in tiles of 128 rows by 4 groups.
TILE_GROUPS: Final = 4
E2M1_MAX: Final = 6.0
E4M3_MAX: Final = 448.0

# `global_scaling` and `total_scaling` where there is no global scale.
NO_SCALING: Final = "none"
# `zero_guard`: where RECIPROCAL gives 0 instead of infinity.
NO_GUARD: Final = "none"
GUARD_SCALE: Final = "scale"  # 1 / d, where the group's scale is 0
GUARD_RECIPROCALS: Final = "reciprocals"  # 1 / d where d is 0, 1 / global_scale where that is 0
# `nan_code` of encoders that work on the bits: what they leave of a NaN's.
BITS: Final = -1


def quant_nvfp4(
    x: Tensor,
    global_scale: Tensor | None,
    amax_scaling: str,
    amax_dtype: torch.dtype | None,
    global_scaling: str,
    scale_min: float | None,
    total_scaling: str,
    scaling: str,
    zero_guard: str,
    nan_code: int,
    nan_sign: bool,
    zero_sign: bool,
    swizzled: bool,
) -> tuple[Tensor, Tensor]:
    """Return the codes of x, uint8 [..., H / 2], and the scales of its groups in float8_e4m3fn.

    x is [..., H] in bfloat16, float16 or float32; `global_scale` g is float32 with one element or None. In
    this order, in float32: a = the largest |x| of 16 neighbours, divided by 6 (`amax_scaling`: DIVIDE, or
    RECIPROCAL for a product with 1/6), rounded to `amax_dtype` (None: as it is); b = a * g (`global_scaling`:
    MULTIPLY), a / g (DIVIDE) or a (NO_SCALING), at least `scale_min`, at most 448, in e4m3: the group's
    scale. Codes are scaled by d = b * g (`total_scaling`: MULTIPLY), b * (1 / g) (RECIPROCAL), b / g (DIVIDE)
    or b: v = x * (1 / d) (`scaling`: RECIPROCAL; what is 0 there by `zero_guard` is said above) or x / d
    (DIVIDE).

    Codes are e2m1, to the nearest, ties to even, saturating at 6; element 2k is in the low nibble. e2m1 has
    no NaN: a NaN is `nan_code`, with its sign if `nan_sign`, and its group's scale is NaN. -0.0 is 8 if
    `zero_sign`, else 0; what rounds to zero from below is always 8.

    Scales are [..., H / 16], or `swizzled` [T to 128, H / 16 to 4]: tiles [T / 128, G / 4, 32, 4, 4] in which
    token t and group g are at [t / 128, g / 4, t % 32, t % 128 / 32, g % 4], what pads being 0; x is [T, H].

    Raises:
        ValueError: H is no multiple of 16, or x has other than two dimensions for the swizzled layout.
    """
    if x.shape[-1] % GROUP != 0:
        raise ValueError(f"a row of {x.shape[-1]} is no multiple of {GROUP}")
    if swizzled and x.dim() != 2:
        raise ValueError(f"the swizzled layout is for [T, H] tensors, not for {x.dim()} dims")
    rows, num_groups = x.shape[:-1], x.shape[-1] // GROUP
    groups = x.to(torch.float32).reshape(*rows, num_groups, GROUP)
    amax = groups.abs().amax(-1)
    amax = amax / E2M1_MAX if amax_scaling == DIVIDE else amax * (1.0 / E2M1_MAX)
    if amax_dtype is not None:
        amax = amax.to(amax_dtype).to(torch.float32)
    factor = None if global_scale is None else global_scale.reshape(())
    scales = _combined(amax, factor, global_scaling, NO_GUARD)
    if scale_min is not None:
        scales = torch.clamp_min(scales, scale_min)
    codes = torch.clamp_max(scales, E4M3_MAX).to(torch.float8_e4m3fn)
    rounded = codes.to(torch.float32)
    total = _combined(rounded, factor, total_scaling, zero_guard)
    if scaling == RECIPROCAL:
        inverse = torch.reciprocal(total)
        if zero_guard != NO_GUARD:
            inverse = torch.where((rounded if zero_guard == GUARD_SCALE else total) == 0, 0.0, inverse)
        scaled = groups * inverse.unsqueeze(-1)
    else:
        scaled = groups / total.unsqueeze(-1)
    nibbles = e2m1(scaled, nan_code, nan_sign, zero_sign)
    packed = (nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)).to(torch.uint8).flatten(-2)
    return packed, _swizzle(codes) if swizzled else codes


def _combined(scales: Tensor, factor: Tensor | None, scaling: str, zero_guard: str) -> Tensor:
    """Combine the scales of groups with the global one."""
    if factor is None:
        return scales
    if scaling == DIVIDE:
        return scales / factor
    if scaling == MULTIPLY:
        return scales * factor
    inverse = torch.reciprocal(factor)
    if zero_guard == GUARD_RECIPROCALS:
        inverse = torch.where(factor == 0, 0.0, inverse)
    return scales * inverse


def e2m1(values: Tensor, nan_code: int, nan_sign: bool, zero_sign: bool) -> Tensor:
    """Return the e2m1 codes of float32 values as int32, as `quant_nvfp4` says.

    Thresholds lie half-way between 0, .5, 1, 1.5, 2, 3, 4, 6.
    """
    magnitude, bits = values.abs(), values.view(torch.int32)
    sign = (bits >> 28) & 8
    code = torch.zeros_like(bits)
    for above in (
        magnitude > 0.25,
        magnitude >= 0.75,
        magnitude > 1.25,
        magnitude >= 1.75,
        magnitude > 2.5,
        magnitude >= 3.5,
        magnitude > 5.0,
    ):
        code = code + above.to(torch.int32)
    code = code | sign
    if not zero_sign:
        code = torch.where(values == 0, 0, code)
    if nan_code == BITS:
        # Rounded to 1 bit of mantissa, with another bias, and cut.
        nan = bits & 0x7FFFFFFF
        nan = ((nan - 0x3EE00001 + ((nan >> 22) & 1)) >> 22) & 7
    else:
        nan = torch.full_like(code, nan_code)
    return torch.where(values.isnan(), nan | sign if nan_sign else nan, code)


def _swizzle(scales: Tensor) -> Tensor:
    """Put [T, G] scales into tiles of 128 by 4."""
    padded = zeros_after(zeros_after(scales.view(torch.uint8), TILE_GROUPS).t(), TILE_ROWS)
    columns, rows = padded.shape
    # By index: a dimension that counts tiles would be asked whether it is 1, and the answer burnt in.
    place = torch.arange(rows * columns, device=scales.device)
    within, tile = place % (TILE_ROWS * TILE_GROUPS), place // (TILE_ROWS * TILE_GROUPS)
    tile_row, tile_column = tile // (columns // TILE_GROUPS), tile % (columns // TILE_GROUPS)
    row = tile_row * TILE_ROWS + within // 4 % 4 * 32 + within // 16
    column = tile_column * TILE_GROUPS + within % 4
    return padded.reshape(-1)[column * rows + row].reshape(rows, columns).view(torch.float8_e4m3fn)
