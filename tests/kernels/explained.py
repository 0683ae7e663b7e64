"""Which codes and scales a graph's own roundings explain: intervals around what float64 gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuse_cache.kernels.act_and_mul.op import ACT_AND_MUL
from fuse_cache.kernels.act_and_mul.reference import GELU, GELU_TANH
from fuse_cache.kernels.quant_dynamic.op import QUANT_DYNAMIC
from fuse_cache.kernels.quant_dynamic.reference import (
    INVERSE,
    INVERSE64,
    LOG2_POWER,
    NO_POWER,
    PER_TOKEN,
    ROW,
)
from fuse_cache.kernels.quant_fp8_static.op import QUANT_FP8_STATIC
from fuse_cache.kernels.quant_nvfp4.reference import E2M1_MAX, e2m1
from fuse_cache.kernels.scaling import DIVIDE, MULTIPLY
from tests.kernels.cases import Case
from tests.kernels.truth import wide_norm_or_act

# A producer rounds at most so often: a sum, a norm, a weight with its bias, a product, a result.
_ROUNDINGS = 6
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and the ends between which roundings leave it, all as float64."""

    value: Tensor
    low: Tensor
    high: Tensor

    def holds(self, found: Tensor) -> Tensor:
        """Return, element by element, whether a value lies between the ends."""
        return (self.low <= found) & (found <= self.high)


def unit(dtype: torch.dtype) -> float:
    """Return the relative error of one rounding to a dtype, of float32 with room for sums and divisions."""
    return torch.finfo(dtype).eps / 2 if dtype != torch.float32 else torch.finfo(dtype).eps * 16


def around(value: Tensor, error: float, more: Tensor | float = 0.0) -> Interval:
    """Return the interval of a relative error and of a difference `more`."""
    room = value.abs() * error + more + 1e-37  # What is below float32's least normal number.
    return Interval(value, value - room, value + room)


def row_form(quantiser: Case, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the attributes of a case with its scales row by row."""
    attributes = quantiser.attributes(dtype)
    if quantiser.operator == QUANT_FP8_STATIC:
        return attributes
    return (*attributes[:-1], ROW if quantiser.operator == QUANT_DYNAMIC else False)


@dataclass(frozen=True, slots=True)
class Exact:
    """What a producer computes, [T, H] in float64, and by how much float32 may miss it beside roundings."""

    value: Tensor
    room: Tensor


def exact(producer: Case, arguments: tuple[Any, ...], dtype: torch.dtype) -> Exact:
    """Run a producer in float64.

    GELU's 1 + f(g) cancels in float32: what is left is a share of g. Small numbers of float16 have no
    relative error: each is off by half a step, times what it is multiplied by.
    """
    value = wide_norm_or_act(producer, arguments)[0]
    largest = max(float(one.abs().max()) for one in arguments if isinstance(one, Tensor))
    step = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    room = torch.full_like(value, _ROUNDINGS * step / 2 * max(1.0, largest))
    if producer.operator == ACT_AND_MUL and arguments[2] in (GELU, GELU_TANH):
        gate, up, *_ = arguments
        gate, up = gate.chunk(2, -1) if up is None else (gate, up)
        room += (gate.double() * up.double()).abs() * 2.0**-22
    return Exact(value, room)


def _grouped(values: Tensor, group: int) -> Tensor:
    return values.reshape(*values.shape[:-1], -1, group)


def scales_explained(
    exact: Exact, factor: Any, quantiser: Case, scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return whether each scale is one that the roundings behind `exact` explain."""
    attributes = row_form(quantiser, dtype)
    error = _ROUNDINGS * unit(dtype) + 2 * unit(torch.float32)
    found = scales.double()
    if quantiser.operator == QUANT_DYNAMIC:
        group, amax_min, amax_max, rule, divisor, scale_dtype, scale_min, power, *_ = attributes
        amax = _largest(exact, exact.value.shape[-1] if group == PER_TOKEN else group, error)
        ends = [_bounded(end, amax_min, amax_max, factor) for end in (amax.low, amax.high)]
        if rule in (INVERSE, INVERSE64):
            ends = [divisor / end for end in reversed(ends)]
        else:
            ends = [end / divisor if rule == DIVIDE else end * divisor for end in ends]
        room = unit(torch.float32) if scale_dtype is None else unit(scale_dtype)
        ends = [ends[0] * (1 - 2 * room), ends[1] * (1 + 2 * room)]
        if scale_min is not None:
            ends = [end.clamp(min=torch.tensor(scale_min).item()) for end in ends]
        if power != NO_POWER:
            # log2 in float32 may round down to an integer: then the power is less than the scale.
            slack = 1e-6 if power == LOG2_POWER else 0.0
            ends = [torch.exp2(torch.ceil(torch.log2(end * (1 - slack)))) for end in ends]
        return Interval(found, ends[0], ends[1]).holds(found)
    _, amax_dtype, global_scaling, scale_min, *_ = attributes
    error += 0.0 if amax_dtype is None else unit(amax_dtype)
    amax = _largest(exact, 16, error)
    whole = 1.0 if factor is None else factor.double()
    by = 1 / whole if global_scaling == DIVIDE else whole
    ends = [(end / E2M1_MAX * by).clamp(max=448.0) for end in (amax.low, amax.high)]
    if scale_min is not None:
        ends = [end.clamp(min=scale_min) for end in ends]
    low, high = (end.float().to(torch.float8_e4m3fn).double() for end in ends)
    return Interval(found, low, high).holds(found)


def _largest(exact: Exact, group: int, error: float) -> Interval:
    values, room = _grouped(exact.value, group), _grouped(exact.room, group)
    return around(values.abs().amax(-1), error, room.amax(-1))


def _bounded(amax: Tensor, least: float | None, most: float | None, bound: Tensor | None) -> Tensor:
    amax = amax.clamp(min=least, max=most) if (least, most) != (None, None) else amax
    return amax if bound is None else torch.minimum(amax, bound.double())


def codes_explained(
    exact: Exact, factor: Any, quantiser: Case, codes: Tensor, scales: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return whether each code is one that roundings explain given its scale, and how far it is from float64.

    The distance counts codes.
    """
    attributes = row_form(quantiser, dtype)
    error = _ROUNDINGS * unit(dtype) + 4 * unit(torch.float32)
    if quantiser.operator not in (QUANT_FP8_STATIC, QUANT_DYNAMIC):
        assert scales is not None
        total = scales.double() * _whole(factor, attributes)
        values, room = (_grouped(one, 16) / total.unsqueeze(-1) for one in (exact.value, exact.room))
        scaled = around(values.flatten(-2), error, room.flatten(-2))
        found = _unpacked(codes)
        ends = [_e2m1_of(end) for end in (scaled.low, scaled.value, scaled.high)]
        return _compared(found, ends, lambda value: torch.searchsorted(_E2M1, value.abs()) * value.sign())
    scaling, scaled_dtype, clamp_min, clamp_max, code = attributes[:5] if scales is None else attributes[8:13]
    if scales is None:
        scale = factor.double()
    else:
        group = attributes[0]
        scale = scales.double() if group == PER_TOKEN else scales.double().repeat_interleave(group, -1)
    by = scale if scaling == MULTIPLY else 1 / scale
    values = exact.value * by
    error += unit(scaled_dtype) if scaled_dtype != torch.float32 else 0.0
    scaled = around(values, error, exact.room * by)
    limit = torch.finfo(code).max if clamp_max is None else clamp_max
    ends = [_encoded(end, -limit if clamp_min is None else clamp_min, limit, code) for end in _ends(scaled)]
    order = (lambda value: value) if code == torch.int8 else _ordered(code)
    explained, steps = _compared(codes.double(), ends, order)
    # Unbounded, what overflows is what the cast makes of it.
    inside = torch.ones_like(explained) if clamp_max is not None else values.abs() < 0.9 * limit
    return explained | ~inside, torch.where(inside, steps, 0)


def _ends(scaled: Interval) -> tuple[Tensor, Tensor, Tensor]:
    return scaled.low, scaled.value, scaled.high


def _whole(factor: Any, attributes: tuple[Any, ...]) -> Any:
    if factor is None:
        return 1.0
    return factor.double() if attributes[4] == MULTIPLY else 1 / factor.double()


def _encoded(values: Tensor, least: float, most: float, code: torch.dtype) -> Tensor:
    bounded = values.clamp(least, most)
    return bounded.round() if code == torch.int8 else bounded.float().to(code).double()


def _e2m1_of(values: Tensor) -> Tensor:
    codes = e2m1(values.float(), 0, False, True)
    return _E2M1[codes & 7] * (1 - (codes >> 3) * 2)


def _unpacked(codes: Tensor) -> Tensor:
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).to(torch.int64)
    return _E2M1[nibbles & 7] * (1 - (nibbles >> 3) * 2)


def _ordered(code: torch.dtype) -> Any:
    def order(values: Tensor) -> Tensor:
        bits = values.float().to(code).view(torch.uint8).to(torch.int32)
        return torch.where(bits < 128, bits, 128 - bits)

    return order


def _compared(found: Tensor, ends: list[Tensor], order: Any) -> tuple[Tensor, Tensor]:
    low, exact, high = ends
    return (low <= found) & (found <= high), (order(found) - order(exact)).abs()
