"""RMSNorm and static FP8 quantisation as models write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Norm: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Quant: TypeAlias = Callable[[Tensor, Tensor], Tensor]
FP8 = torch.float8_e4m3fn


def llama(x: Tensor, weight: Tensor) -> Tensor:
    """Rounded to the input's dtype before the weight."""
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * h.to(x.dtype)


def llama_product(x: Tensor, weight: Tensor) -> Tensor:
    """Llama's, with the square as a product and the operands the other way round."""
    h = x.float()
    h = torch.rsqrt((h * h).mean(-1, keepdim=True) + 3e-5) * h
    return h.to(x.dtype) * weight


def gemma(x: Tensor, weight: Tensor) -> Tensor:
    """Weight + 1 in float32, rounded at last."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (h * (1.0 + weight.float())).type_as(x)


def olmo(x: Tensor, weight: Tensor) -> Tensor:
    """The weight before the rounding."""
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (weight * h).to(x.dtype)


def functional(x: Tensor, weight: Tensor) -> Tensor:
    """PyTorch's own."""
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-5)


def without_weight(x: Tensor, weight: Tensor) -> Tensor:
    """No weight at all."""
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def t5(x: Tensor, weight: Tensor) -> Tensor:
    """Only the variance is widened: the product with it widens the rest."""
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    h = x * torch.rsqrt(variance + 1e-6)
    return weight * h.to(weight.dtype)


def power(x: Tensor, weight: Tensor) -> Tensor:
    """The reciprocal root as a power."""
    h = x.float()
    h = h * torch.pow(h.square().mean(-1, keepdim=True) + 2e-6, -0.5)
    return h.type_as(x) * weight


def wide_weight(x: Tensor, weight: Tensor) -> Tensor:
    """A weight that is widened first, eps before the mean, the last dimension by its number."""
    h = x.to(torch.float32)
    root = (1e-5 + (h * h).mean(x.dim() - 1, True)).rsqrt()
    return (weight.float() * (root * h)).to(x.dtype)


def biased(x: Tensor, weight: Tensor) -> Tensor:
    """Weight + 1 in the weight's own dtype, after the rounding."""
    h = x.float()
    h = h * torch.rsqrt(torch.mean(h**2, dim=-1, keepdim=True) + 1e-6)
    return h.to(x.dtype) * (1 + weight)


def default_eps(x: Tensor, weight: Tensor) -> Tensor:
    """PyTorch's module, with the eps that it chooses."""
    return F.rms_norm(x, [x.shape[-1]], weight)


def without_eps(x: Tensor, weight: Tensor) -> Tensor:
    """Nothing is added to the mean."""
    h = x.float()
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True))).to(x.dtype)


def unscaled(x: Tensor, weight: Tensor) -> Tensor:
    """PyTorch's own without a weight."""
    return F.rms_norm(x, (x.shape[-1],), None, 1e-6)


NORMS: dict[str, Norm] = {
    one.__name__: one
    for one in (
        llama,
        llama_product,
        gemma,
        olmo,
        functional,
        without_weight,
        t5,
        power,
        wide_weight,
        biased,
        default_eps,
        without_eps,
        unscaled,
    )
}


def divide(x: Tensor, scale: Tensor) -> Tensor:
    """In the dtype of x: a scale without dimensions does not widen it."""
    return (x / scale).clamp(-448, 448).to(FP8)


def divide_wide(x: Tensor, scale: Tensor) -> Tensor:
    """In float32."""
    return (x.float() / scale).clamp(min=-448.0, max=448.0).to(FP8)


def reciprocal(x: Tensor, scale: Tensor) -> Tensor:
    """Times one over the scale, bounds by name."""
    limits = torch.finfo(FP8)
    return torch.clamp(x.to(torch.float32) * (1.0 / scale), limits.min, limits.max).to(FP8)


def multiply(x: Tensor, scale: Tensor) -> Tensor:
    """The graph has the reciprocal already; the scale stands first."""
    return (scale * x.float()).clamp(-448, 448).to(FP8)


def rounded_after_scaling(x: Tensor, scale: Tensor) -> Tensor:
    """Scaled in float32, rounded to bfloat16, clamped there."""
    return (x.float() / scale).to(torch.bfloat16).clamp(-448, 448).to(FP8)


def upper_bound_only(x: Tensor, scale: Tensor) -> Tensor:
    """One bound."""
    return (x.float() / scale).clamp(max=448.0).to(FP8)


def unclamped(x: Tensor, scale: Tensor) -> Tensor:
    """No bound: what is too large becomes what the cast makes of it."""
    return (x.float() / scale).to(FP8)


def other_format(x: Tensor, scale: Tensor) -> Tensor:
    """Another FP8 format."""
    return (x.float() / scale).clamp(-57344, 57344).to(torch.float8_e5m2)


QUANTS: dict[str, Quant] = {
    one.__name__: one
    for one in (
        divide,
        divide_wide,
        reciprocal,
        multiply,
        rounded_after_scaling,
        upper_bound_only,
        unclamped,
        other_format,
    )
}


def rows(count: int, size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return rows with a zero row, large and tiny values, infinities and NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, size, generator=generator)
    if count > 4:
        x[1] = 0.0
        x[2] *= 1e4
        x[3, 0] = float("inf")
        x[4, 1] = float("nan")
    return x.to(dtype)


def weights(size: int, dtype: torch.dtype) -> Tensor:
    """Return norm weights around one."""
    generator = torch.Generator().manual_seed(size)
    return (1.0 + 0.3 * torch.randn(size, generator=generator)).to(dtype)
