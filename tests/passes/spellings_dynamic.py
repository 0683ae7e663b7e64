"""Quantisation whose scales come from the values, as models and libraries write it.

Each takes x [T, H] and returns codes and what dequantises them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Dynamic: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
FP8 = torch.float8_e4m3fn
MAX = torch.finfo(FP8).max
FLOOR = 1.0 / (MAX * 512.0)


def per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """With a floor for the scale."""
    scale = (x.abs().amax(-1, keepdim=True).float() / MAX).clamp(min=FLOOR)
    return (x.float() / scale).clamp(-MAX, MAX).to(FP8), scale


def per_token_max(x: Tensor) -> tuple[Tensor, Tensor]:
    """By max with indices, with a floor for the largest value."""
    wide = x.to(torch.float32)
    scale = wide.abs().max(dim=-1, keepdim=True).values.clamp_min(1e-10) / MAX
    return (wide / scale).clamp(min=-MAX, max=MAX).to(FP8), scale


def per_token_multiplied(x: Tensor) -> tuple[Tensor, Tensor]:
    """Times a constant, times a reciprocal."""
    scale = x.float().abs().amax(dim=-1, keepdim=True) * (1.0 / MAX)
    return torch.clamp(x.float() * (1.0 / scale), -MAX, MAX).to(FP8), scale


def per_token_inverse(x: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse scale first; what dequantises is its reciprocal."""
    inverse = MAX / x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12)
    return (x * inverse).clamp(-MAX, MAX).to(FP8), inverse.reciprocal()


def per_token_inverse64(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same by way of float64."""
    largest = torch.amax(torch.abs(x), dim=-1, keepdim=True).to(torch.float64)
    inverse = (MAX / torch.clamp(largest, min=1e-12)).to(torch.float32)
    scaled = x.to(torch.float32) * inverse
    return torch.clamp(scaled, min=-MAX, max=MAX).to(FP8), inverse.reciprocal()


def per_token_float64(x: Tensor) -> tuple[Tensor, Tensor]:
    """A quotient in float64 rounds to the same float32."""
    scale = (x.abs().amax(-1, keepdim=True).double() / MAX).float().clamp(min=1e-12)
    return (x.float() / scale).clamp(-MAX, MAX).to(FP8), scale


def per_token_narrow(x: Tensor) -> tuple[Tensor, Tensor]:
    """All of it in the dtype of x."""
    scale = x.abs().amax(-1, keepdim=True) / MAX
    return (x / scale).clamp(-MAX, MAX).to(FP8), scale


def per_token_keyless(x: Tensor) -> tuple[Tensor, Tensor]:
    """The scale loses its last dimension and gets it back."""
    scale = x.float().abs().amax(-1) / MAX
    return (x.float() / scale.unsqueeze(-1)).clamp(-MAX, MAX).to(FP8), scale[:, None]


def per_token_bounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """With an upper bound for the largest value."""
    largest = x.float().abs().amax(-1, keepdim=True).clamp(max=1200.0)
    scale = (largest / MAX).clamp(min=FLOOR)
    return (x.float() / scale).clamp(-MAX, MAX).to(FP8), scale


def per_token_other_format(x: Tensor) -> tuple[Tensor, Tensor]:
    """Another FP8 format, unclamped."""
    scale = x.float().abs().amax(-1, keepdim=True) / 57344.0
    return (x.float() / scale).to(torch.float8_e5m2), scale


def group_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """One scale for 64 neighbours, row by row."""
    groups = x.float().view(x.shape[0], -1, 64)
    scale = groups.abs().amax(-1, keepdim=True).clamp(1e-4) / MAX
    return (groups / scale).to(FP8).view(x.shape), scale.squeeze(-1)


def group_flat(x: Tensor) -> tuple[Tensor, Tensor]:
    """Groups as rows, widened afterwards."""
    groups = x.reshape(-1, 64)
    scale = groups.abs().amax(dim=-1, keepdim=True).to(torch.float32) / MAX
    codes = (groups.float() * scale.reciprocal()).clamp(-MAX, MAX).to(FP8)
    return codes.reshape(x.shape), scale.reshape(x.shape[0], -1)


def group_column(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scales column by column."""
    groups = x.view(x.shape[0], -1, 128)
    scale = groups.abs().float().amax(-1).clamp(min=1e-10) / MAX
    codes = (groups.float() / scale.unsqueeze(-1)).clamp(-MAX, MAX).to(FP8)
    return codes.flatten(-2), scale.t().contiguous().t()


def group_tma(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scales column by column, each at a multiple of 16 bytes."""
    groups = x.float().view(x.shape[0], -1, 64)
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) / MAX
    codes = (groups * (1.0 / scale)).to(FP8).view(x.shape)
    rows = x.shape[0]
    # A copy first: where nothing is missing, a pad keeps the strides of what it pads.
    columns = scale.squeeze(-1).t().clone(memory_format=torch.contiguous_format)
    return codes, F.pad(columns, (0, -rows % 4))[:, :rows].t()


def group_power(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scales that are powers of two."""
    groups = x.float().view(x.shape[0], x.shape[1] // 128, 128)
    scale = groups.abs().amax(dim=2, keepdim=True).clamp(min=1e-4) / MAX
    scale = torch.pow(2.0, torch.ceil(torch.log2(scale)))
    return (groups * (1.0 / scale)).to(FP8).view(x.shape), scale.view(x.shape[0], -1)


def group_power_exp2(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same by exp2, with a floor for the scale."""
    groups = x.view(x.shape[0], -1, 64).float()
    scale = (groups.abs().amax(-1) / MAX).clamp(min=1e-10)
    scale = torch.exp2(torch.ceil(torch.log2(scale)))
    codes = (groups / scale.unsqueeze(-1)).clamp(-MAX, MAX).to(FP8)
    return codes.view_as(x), scale


def group_power_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scales that are powers of two, by their exponents: one more where the mantissa is not zero."""
    groups = x.view(x.shape[0], -1, 128).float()
    scale = groups.abs().amax(dim=-1).clamp(min=1e-4) / MAX
    bits = scale.abs().view(torch.int32)
    exponent = ((bits >> 23) & 255) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    scale = (exponent.clamp(1, 254) << 23).view(torch.float32)
    return (groups * (1.0 / scale.unsqueeze(-1))).to(FP8).view(x.shape), scale


def group_power_masked(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same by an addition that carries into the exponent."""
    groups = x.float().view(x.shape[0], -1, 64)
    scale = groups.abs().amax(-1, keepdim=True) / MAX
    scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return (groups / scale).clamp(-MAX, MAX).to(FP8).view(x.shape), scale.squeeze(-1)


def group_power_finite(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same where there is a number."""
    groups = x.float().view(x.shape[0], -1, 64)
    scale = groups.abs().amax(-1, keepdim=True) / MAX
    bits = scale.view(torch.int32)
    up = (bits + 0x7FFFFF) & 0x7F800000
    scale = torch.where(bits < 0x7F800000, up, bits).view(torch.float32)
    return (groups / scale).clamp(-MAX, MAX).to(FP8).view(x.shape), scale.squeeze(-1)


def group_tma_assigned(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scales column by column, assigned to a tensor that is aligned."""
    groups = x.float().view(x.shape[0], -1, 64)
    scale = groups.abs().amax(-1).clamp(min=1e-4) / MAX
    codes = (groups * (1.0 / scale).unsqueeze(-1)).to(FP8).view(x.shape)
    rows, columns = scale.shape
    aligned = torch.zeros(columns, (rows + 3) // 4 * 4, device=x.device).t()
    aligned[:rows] = scale
    return codes, aligned[:rows]


def group_packed(x: Tensor) -> tuple[Tensor, Tensor]:
    """Four exponents in an int32, column by column, aligned."""
    groups = x.float().view(x.shape[0], -1, 64)
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) / MAX
    scale = torch.pow(2.0, torch.ceil(torch.log2(scale)))
    codes = (groups * (1.0 / scale)).to(FP8).view(x.shape)
    exponents = (scale.squeeze(-1).view(torch.int32) >> 23).to(torch.uint8)
    rows, columns = exponents.shape
    high, wide = (rows + 3) // 4 * 4, (columns + 3) // 4 * 4
    padded = torch.zeros(high, wide, dtype=torch.uint8, device=x.device)
    padded[:rows, :columns] = exponents
    words = padded.view(torch.int32)
    return codes, words.t().contiguous().t()[:rows]


def int8_divided(x: Tensor) -> tuple[Tensor, Tensor]:
    """INT8: divided, rounded, clamped."""
    scale = x.abs().amax(-1, keepdim=True).float() / 127.0
    return torch.round(x.float() / scale).clamp(-128, 127).to(torch.int8), scale


def int8_multiplied(x: Tensor) -> tuple[Tensor, Tensor]:
    """INT8: multiplied with the reciprocal, clamped, then rounded."""
    wide = x.float()
    scale = torch.clamp(wide.abs().amax(dim=-1, keepdim=True), min=1e-5).div(127)
    return (wide * (1 / scale)).clamp(-127, 127).round().to(torch.int8), scale


def int8_floored(x: Tensor) -> tuple[Tensor, Tensor]:
    """INT8: with the machine's epsilon as the least scale."""
    scale = x.abs().max(dim=-1).values.float() / 127.5
    scale = scale.clamp(min=torch.finfo(torch.float32).eps).unsqueeze(-1)
    return (x.float() / scale).round().clamp(-128, 127).to(torch.int8), scale


DYNAMIC: dict[str, Dynamic] = {
    one.__name__: one
    for one in (
        per_token,
        per_token_max,
        per_token_multiplied,
        per_token_inverse,
        per_token_inverse64,
        per_token_float64,
        per_token_narrow,
        per_token_keyless,
        per_token_bounded,
        per_token_other_format,
        group_row,
        group_flat,
        group_column,
        group_tma,
        group_power,
        group_power_exp2,
        group_power_bits,
        group_power_masked,
        group_power_finite,
        group_tma_assigned,
        group_packed,
        int8_divided,
        int8_multiplied,
        int8_floored,
    )
}


def per_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    """One scale for all: raised, never fused."""
    scale = x.abs().max().float() / MAX
    return (x.float() / scale).clamp(-MAX, MAX).to(FP8), scale


def per_tensor_inverse64(x: Tensor) -> tuple[Tensor, Tensor]:
    """One scale for all, by way of float64."""
    inverse = (MAX / torch.clamp(x.abs().amax().double(), min=1e-12)).float()
    return (x.float() * inverse).clamp(-MAX, MAX).to(FP8), inverse.reciprocal()


PER_TENSOR: dict[str, Dynamic] = {one.__name__: one for one in (per_tensor, per_tensor_inverse64)}
