"""Static per-tensor FP8 quantisation in plain PyTorch: the truth."""

from __future__ import annotations

import torch
from torch import Tensor

DIVIDE = "divide"  # x / scale
RECIPROCAL = "reciprocal"  # x * (1 / scale), the reciprocal rounded to float32
MULTIPLY = "multiply"  # x * scale: the graph holds the reciprocal already
SCALINGS = (DIVIDE, RECIPROCAL, MULTIPLY)


def quant_fp8_static(
    x: Tensor,
    scale: Tensor,
    scaling: str,
    scaled_dtype: torch.dtype,
    clamp_min: float | None,
    clamp_max: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the FP8 codes of x scaled, element by element.

    x is [...] in bfloat16, float16 or float32, scale float32 with one element and no more dimensions than x.
    Computed in float32; `scaled_dtype` is the dtype that the scaled value is rounded to, `clamp_min` and
    `clamp_max` its bounds (None: none, and then what is out of range becomes what the cast makes of it). NaN
    stays NaN.
    """
    factor = torch.reciprocal(scale) if scaling == RECIPROCAL else scale
    wide = x.to(torch.float32)
    scaled = wide / factor if scaling == DIVIDE else wide * factor
    scaled = scaled.to(scaled_dtype).to(torch.float32)
    if clamp_min is not None:
        scaled = torch.clamp_min(scaled, clamp_min)
    if clamp_max is not None:
        scaled = torch.clamp_max(scaled, clamp_max)
    return scaled.to(dtype)
