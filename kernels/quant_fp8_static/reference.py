"""Static per-tensor FP8 quantisation in plain PyTorch: the truth."""

from __future__ import annotations

import torch
from torch import Tensor

from fuse_cache.kernels.scaling import encode


def quant_fp8_static(
    x: Tensor,
    scale: Tensor,
    scaling: str,
    scaled_dtype: torch.dtype,
    clamp_min: float | None,
    clamp_max: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the FP8 codes of x scaled, element by element: `scaling.encode` with one scale.

    x is [...] in bfloat16, float16 or float32, scale float32 with one element and no more dimensions than x.
    """
    return encode(x, scale, scaling, scaled_dtype, clamp_min, clamp_max, dtype)
