"""RMSNorm + static FP8 in plain PyTorch: the two references in sequence: no rounding changes."""

from __future__ import annotations

import torch
from torch import Tensor

from fuse_cache.kernels.quant_fp8_static.reference import quant_fp8_static
from fuse_cache.kernels.rms_norm.reference import rms_norm


def rms_norm_quant_fp8_static(
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor,
    eps: float,
    weight_bias: float,
    weight_dtype: torch.dtype | None,
    norm_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
    scaling: str,
    scaled_dtype: torch.dtype,
    clamp_min: float | None,
    clamp_max: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the FP8 codes of the normalised rows. Shapes and attributes are those of the two references."""
    norm = rms_norm(x, weight, eps, weight_bias, weight_dtype, norm_dtype, out_dtype)
    return quant_fp8_static(norm, scale, scaling, scaled_dtype, clamp_min, clamp_max, dtype)
