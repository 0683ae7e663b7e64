"""What kernels are compared with: the same operations in float64 with no rounding, and distances of codes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuse_cache.kernels.act_and_mul.op import ACT_AND_MUL
from fuse_cache.kernels.act_and_mul.reference import GELU, GELU_TANH
from fuse_cache.kernels.fused_add_rms_norm.op import FUSED_ADD_RMS_NORM
from tests.kernels.cases import Case

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def bits(value: Tensor) -> Tensor:
    """Return the bits of a tensor as integers."""
    return value.view(_INTEGERS[value.element_size()])


def assert_same_bits(one: Tensor, other: Tensor) -> None:
    """Assert that layouts and bits are equal. All NaN are one: hardware gives them no sign."""
    assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    equal = bits(one) == bits(other)
    if one.is_floating_point():
        equal |= one.float().isnan() & other.float().isnan()
    assert bool(equal.all()), f"{int((~equal).sum())} of {equal.numel()} differ"


def wide_norm_or_act(case: Case, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Return what a producer computes, in float64 throughout."""
    if case.operator == ACT_AND_MUL:
        gate, up, activation, *_ = arguments
        gate, up = gate.chunk(2, -1) if up is None else (gate, up)
        gate, up = gate.double(), up.double()
        if activation in (GELU, GELU_TANH):
            return (F.gelu(gate, approximate="none" if activation == GELU else "tanh") * up,)
        return (F.silu(gate) * up,)
    if case.operator == FUSED_ADD_RMS_NORM:
        x, residual, weight, eps, bias, *_ = arguments
        total = x.double() + residual.double()
        return _wide_norm(total, weight, eps, bias), total
    x, weight, eps, bias, *_ = arguments
    return (_wide_norm(x.double(), weight, eps, bias),)


def _wide_norm(x: Tensor, weight: Tensor | None, eps: float, bias: float) -> Tensor:
    norm = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return norm if weight is None else norm * (weight.double() + bias)


def steps_apart(codes: Tensor, exact: Tensor) -> Tensor:
    """Return how many e4m3fn codes lie between codes and the nearest to exact values."""
    nearest = exact.clamp(-448.0, 448.0).float().to(torch.float8_e4m3fn)
    return (_ordered(codes) - _ordered(nearest)).abs()


def _ordered(codes: Tensor) -> Tensor:
    """Return integers that order as the values of the codes do; both zeros are 0."""
    value = codes.view(torch.uint8).to(torch.int32)
    return torch.where(value < 128, value, 128 - value)
