"""Addition of a residual + RMSNorm in plain PyTorch: the truth."""

from __future__ import annotations

import torch
from torch import Tensor

from fuse_cache.kernels.rms_norm.reference import rms_norm


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_bias: float,
    weight_dtype: torch.dtype | None,
    norm_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
    sum_dtype: torch.dtype,
    norm_of_rounded: bool,
) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual, and the sum itself in `sum_dtype`: the next residual.

    x and residual are [..., H] in bfloat16, float16 or float32, not always the same. They are added in
    float32; `norm_of_rounded` says whether the norm reads the sum before or after its rounding to
    `sum_dtype`. Weight and the other attributes are those of `rms_norm`.
    """
    exact = x.to(torch.float32) + residual.to(torch.float32)
    rounded = exact.to(sum_dtype)
    normed = rounded if norm_of_rounded else exact
    return rms_norm(normed, weight, eps, weight_bias, weight_dtype, norm_dtype, out_dtype), rounded
