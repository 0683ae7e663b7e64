"""How scaled values become codes: what every quantiser shares, in plain PyTorch."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

DIVIDE: Final = "divide"  # x / scale
RECIPROCAL: Final = "reciprocal"  # x * (1 / scale), the reciprocal rounded to float32
RECIPROCAL_BF16: Final = "reciprocal_bfloat16"  # the reciprocal rounded to bfloat16
RECIPROCAL_FP16: Final = "reciprocal_float16"
MULTIPLY: Final = "multiply"  # x * scale: the graph holds the reciprocal already
SCALINGS: Final = (DIVIDE, RECIPROCAL, RECIPROCAL_BF16, RECIPROCAL_FP16, MULTIPLY)
# By the dtype that the reciprocal is rounded to.
RECIPROCALS: Final = {
    torch.float32: RECIPROCAL,
    torch.bfloat16: RECIPROCAL_BF16,
    torch.float16: RECIPROCAL_FP16,
}


def encode(
    x: Tensor,
    scale: Tensor,
    scaling: str,
    scaled_dtype: torch.dtype,
    clamp_min: float | None,
    clamp_max: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the codes of x scaled, element by element.

    x is [...] in bfloat16, float16 or float32, scale float32 and broadcasts to it. Computed in float32;
    `scaled_dtype` is the dtype that the scaled value is rounded to, `clamp_min` and `clamp_max` its bounds
    (None: none, and then what is out of range becomes what the cast makes of it). Codes of int8 are rounded
    to the nearest, ties to even, before they are clamped. NaN stays NaN in FP8; in int8, which has none, it
    is whatever the cast makes of it.
    """
    factor = scale
    for kind, name in RECIPROCALS.items():
        if scaling == name:
            factor = torch.reciprocal(scale).to(kind).to(torch.float32)
    wide = x.to(torch.float32)
    scaled = wide / factor if scaling == DIVIDE else wide * factor
    scaled = scaled.to(scaled_dtype).to(torch.float32)
    if dtype == torch.int8:
        scaled = torch.round(scaled)
    if clamp_min is not None:
        scaled = torch.clamp_min(scaled, clamp_min)
    if clamp_max is not None:
        scaled = torch.clamp_max(scaled, clamp_max)
    return scaled.to(dtype)


def zeros_after(rows: Tensor, multiple: int) -> Tensor:
    """Return [A, B] with columns of zeros, up to the next multiple; contiguous. B may be symbolic."""
    height, width = rows.shape
    # Not `-width % multiple`: sums with it do not simplify, and shapes of them would need guards. Not by
    # `cat`: compiled, it asks whether there is any padding, and the answer is burnt in.
    padded = rows.new_zeros(height, (width + multiple - 1) // multiple * multiple)
    return torch.slice_scatter(padded, rows, 1, 0, width)
