"""NVFP4 quantisation in plain PyTorch: the truth."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from fuse_cache.kernels.scaling import DIVIDE, RECIPROCAL, zeros_after

GROUP: Final = 16
TILE_ROWS: Final = 128  # Swizzled scales come in tiles of 128 rows by 4 groups.
TILE_GROUPS: Final = 4
E2M1_MAX: Final = 6.0
E4M3_MAX: Final = 448.0


def quant_nvfp4(
    x: Tensor,
    global_scale: Tensor,
    amax_scaling: str,
    amax_dtype: torch.dtype | None,
    global_scaling: str,
    scale_min: float | None,
    scaling: str,
    swizzled: bool,
) -> tuple[Tensor, Tensor]:
    """Return the codes of x, uint8 [..., H / 2], and the scales of its groups in float8_e4m3fn.

    x is [..., H] in bfloat16, float16 or float32; `global_scale` is float32 with one element. In this order,
    in float32: a = the largest |x| of 16 neighbours, divided by 6 (`amax_scaling`: DIVIDE, or RECIPROCAL for
    a product with 1/6), rounded to `amax_dtype` (None: as it is); b = a * global_scale (`global_scaling`:
    MULTIPLY) or a / global_scale (DIVIDE), at least `scale_min`, at most 448, in e4m3: the group's scale.
    Codes are scaled by d = b * (1 / global_scale) or b * global_scale: v = x * (1 / d), 0 where b is 0
    (`scaling`: RECIPROCAL), or x / d (DIVIDE). Codes are e2m1, to the nearest, ties to even, saturating at
    6; element 2k is in the low nibble. e2m1 has no NaN: a NaN gives 0, and its group's scale is NaN.

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
    factor = global_scale.reshape(())
    scales = amax / factor if global_scaling == DIVIDE else amax * factor
    if scale_min is not None:
        scales = torch.clamp_min(scales, scale_min)
    codes = torch.clamp_max(scales, E4M3_MAX).to(torch.float8_e4m3fn)
    rounded = codes.to(torch.float32)
    total = rounded * (factor if global_scaling == DIVIDE else torch.reciprocal(factor))
    if scaling == RECIPROCAL:
        inverse = torch.where(rounded == 0, 0.0, torch.reciprocal(total))
        scaled = groups * inverse.unsqueeze(-1)
    else:
        scaled = groups / total.unsqueeze(-1)
    nibbles = _e2m1(scaled)
    packed = (nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)).to(torch.uint8).flatten(-2)
    return packed, _swizzle(codes) if swizzled else codes


def _e2m1(values: Tensor) -> Tensor:
    """Return the e2m1 codes as int32. Thresholds lie half-way between 0, .5, 1, 1.5, 2, 3, 4, 6."""
    magnitude = values.abs()
    code = (values.view(torch.int32) >> 28) & 8  # The sign.
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
    return torch.where(values.isnan(), 0, code)


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
