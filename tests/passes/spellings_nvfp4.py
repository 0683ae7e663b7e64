"""NVFP4 quantisation as libraries write it: how codes are rounded and packed, how scales are laid out.

Each takes x [T, H] and a global scale and returns packed codes and scales in e4m3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.spellings import FP8

LARGEST, LARGEST_SCALE = 6.0, 448.0
BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def groups_of(x: Tensor) -> Tensor:
    """Return [T, H / 16, 16]."""
    return x.float().view(x.shape[0], -1, 16)


def codes_by_counting(v: Tensor) -> Tensor:
    """How many thresholds lie below; a tie goes to the even code."""
    size = v.abs()
    code = torch.zeros_like(v, dtype=torch.uint8)
    for place, bound in enumerate(BOUNDS):
        code = code + (size >= bound if place % 2 else size > bound)
    return code | (torch.signbit(v).to(torch.uint8) << 3)


def codes_by_bits(v: Tensor) -> Tensor:
    """By the bits of float32: one bit of mantissa is kept, subnormals are rounded by an addition."""
    bits = v.view(torch.int32)
    sign = bits & -0x80000000
    magnitude = (bits ^ sign).view(torch.float32)
    too_large = magnitude >= LARGEST
    small = torch.logical_and(torch.logical_not(too_large), magnitude < 1.0)
    normal = torch.logical_not(torch.logical_or(too_large, small))
    # 2^22 has its last bit at 1/2.
    magic = (127 - 1) + (23 - 1) + 1 << 23
    offset = torch.tensor(magic, dtype=torch.int32).view(torch.float32)
    of_small = ((magnitude + offset).view(torch.int32) - magic).to(torch.uint8)
    of_normal = magnitude.view(torch.int32)
    odd = (of_normal >> 22) & 1
    of_normal = ((of_normal + ((1 - 127 << 23) + (1 << 21) - 1) + odd) >> 22).to(torch.uint8)
    code = torch.full_like(v, 7, dtype=torch.uint8)
    code = torch.where(small, of_small, code)
    code = torch.where(normal, of_normal, code)
    return code | ((sign >> 28).to(torch.uint8) & 8)


def codes_by_table(v: Tensor) -> Tensor:
    """By a search in the thresholds; on every second of them one more."""
    bounds = torch.tensor(BOUNDS).to(v.device)
    size = v.abs()
    code = torch.bucketize(size, bounds)
    tie = (size == 0.75) | (size == 1.75) | (size == 3.5)
    return (code + tie + 8 * (v < 0)).to(torch.uint8)


def codes_by_masks(v: Tensor) -> Tensor:
    """Range after range is assigned."""
    size = v.abs()
    code = torch.zeros(v.shape, dtype=torch.int32, device=v.device)
    code[(size > 0.25) & (size < 0.75)] = 1
    code[(size >= 0.75) & (size <= 1.25)] = 2
    code[(size > 1.25) & (size < 1.75)] = 3
    code[(size >= 1.75) & (size <= 2.5)] = 4
    code[(size > 2.5) & (size < 3.5)] = 5
    code[(size >= 3.5) & (size <= 5.0)] = 6
    code[size > 5.0] = 7
    return torch.where(v < 0, code + 8, code)


def pack_slices(codes: Tensor) -> Tensor:
    """Even elements low, odd ones high."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def pack_flat(codes: Tensor) -> Tensor:
    """The same of all in one row."""
    flat = codes.contiguous().view(-1)
    return (flat[1::2] << 4 | flat[::2]).view(codes.shape[0], -1)


def pack_pairs(codes: Tensor) -> Tensor:
    """The same as pairs, by arithmetic."""
    pairs = codes.view(codes.shape[0], -1, 2)
    return (pairs[..., 0] + pairs[..., 1] * 16).to(torch.uint8)


def swizzled_by_blocks(scales: Tensor) -> Tensor:
    """Into zeros, then blocks of 128 by 4."""
    rows, columns = scales.shape
    row_blocks, column_blocks = (rows + 127) // 128, (columns + 3) // 4
    padded = torch.zeros(row_blocks * 128, column_blocks * 4, dtype=scales.dtype, device=scales.device)
    padded[:rows, :columns] = scales
    blocks = padded.view(row_blocks, 128, column_blocks, 4).permute(0, 2, 1, 3)
    return blocks.reshape(-1, 4, 32, 4).transpose(1, 2).reshape(-1, 32, 16).flatten()


def swizzled_at_once(scales: Tensor) -> Tensor:
    """By one permutation of six dimensions."""
    rows, columns = scales.shape
    high, wide = (rows + 127) // 128 * 128, (columns + 3) // 4 * 4
    padded = F.pad(scales.view(torch.uint8), (0, wide - columns, 0, high - rows)).view(FP8)
    tiles = padded.reshape(high // 128, 4, 32, wide // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.contiguous().reshape(high, wide)


def divided(x: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """All by division, scales no less than the least normal number; codes by bits, scales in tiles."""
    groups = groups_of(x)
    scale = groups.abs().amax(-1) / LARGEST / whole
    scale = torch.clamp(scale, min=2.0**-6, max=LARGEST_SCALE).to(FP8)
    total = whole * scale.to(torch.float32)
    values = torch.clamp(groups / total.unsqueeze(-1), -LARGEST, LARGEST).view(x.shape)
    return pack_flat(codes_by_bits(values)), swizzled_by_blocks(scale)


def alone(x: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Without a global scale."""
    groups = groups_of(x)
    scale = (groups.abs().amax(dim=-1) / LARGEST).clamp(2.0**-6, LARGEST_SCALE).to(FP8)
    values = (groups / scale.float().unsqueeze(-1)).clamp(-LARGEST, LARGEST).view(x.shape)
    return pack_flat(codes_by_bits(values)), scale


def guarded(value: Tensor) -> Tensor:
    """Return 1 / value, of zero 0."""
    return torch.where(value == 0, 0.0, 1.0 / value)


def multiplied(x: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """All by multiplication, every reciprocal of zero being zero."""
    groups = x.reshape(x.shape[0], x.shape[1] // 16, 16)
    largest = torch.max(torch.abs(groups), dim=-1, keepdim=True)[0].to(torch.float32)
    scale = torch.clamp(whole * (largest * (1.0 / LARGEST)), max=LARGEST_SCALE, min=-LARGEST_SCALE).to(FP8)
    factor = guarded(scale.to(torch.float32) * guarded(whole))
    values = (groups.to(torch.float32) * factor).clamp(-LARGEST, LARGEST).reshape(x.shape)
    return pack_slices(codes_by_counting(values)), scale.squeeze(-1)


def multiplied_once(x: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Where a scale is zero, so are its codes; scales in tiles."""
    groups = groups_of(x)
    scale = (groups.abs().amax(-1) * (1.0 / LARGEST) * whole).clamp(max=LARGEST_SCALE).to(FP8)
    wide = scale.float()
    factor = torch.where(wide != 0, (wide * whole.reciprocal()).reciprocal(), 0.0)
    values = groups * factor.unsqueeze(-1)
    return pack_pairs(codes_by_table(values).view(x.shape)), swizzled_at_once(scale)


def narrow(x: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value is divided in the dtype of x, the scale of a group by the global one."""
    groups = x.view(x.shape[0], -1, 16)
    scale = (groups.abs().amax(-1) / LARGEST).float() * whole
    scale = scale.clamp(max=LARGEST_SCALE).to(FP8)
    total = (scale.float() / whole).unsqueeze(-1)
    values = (groups.float() / total).view_as(x)
    return pack_slices(codes_by_masks(values).to(torch.uint8)), scale


NVFP4 = {one.__name__: one for one in (divided, alone, multiplied, multiplied_once, narrow)}
