"""RMSNorm in plain PyTorch: the truth."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_bias: float = 0.0,
    weight_dtype: torch.dtype | None = None,
    norm_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * (weight + weight_bias), row by row.

    x is [..., H] in bfloat16, float16 or float32, weight [H] of any of these or None. Everything is computed
    in float32 and rounded where the attributes say: `norm_dtype` before the weight, `weight_dtype` the weight
    before its bias, `out_dtype` the product at last. None means no rounding there. A product of two roundings
    is rounded to their promoted dtype, as PyTorch multiplies.

    Source: Zhang and Sennrich 2019; the roundings are those of Hugging Face's Llama (norm_dtype), Gemma
    (weight_bias, weight_dtype, out_dtype) and torch.nn.functional.rms_norm (out_dtype).
    """
    wide = x.to(torch.float32)
    norm = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if norm_dtype is not None:
        norm = norm.to(norm_dtype)
    if weight is not None:
        if weight_dtype is not None:
            weight = weight.to(weight_dtype)
        if weight_bias != 0.0:
            weight = (weight.to(torch.float32) + weight_bias).to(weight.dtype)
        product_dtype = torch.promote_types(norm.dtype, weight.dtype)
        norm = (norm.to(torch.float32) * weight.to(torch.float32)).to(product_dtype)
    return norm if out_dtype is None else norm.to(out_dtype)
