"""Reads how a graph computes a scale from the values that it scales: what it bounds, divides and rounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from fuse_cache.kernels.quant_dynamic.reference import (
    INVERSE,
    INVERSE64,
    LOG2_POWER,
    NO_POWER,
)
from fuse_cache.kernels.scaling import DIVIDE, MULTIPLY
from fuse_cache.passes.base import Reason
from fuse_cache.passes.raised import Miss
from fuse_cache.passes.read_amax import read_amax
from fuse_cache.passes.read_power import read_power, source_of_bits
from fuse_cache.passes.reading import (
    LOW_PRECISION,
    RESHAPES,
    aten,
    cast_source,
    dtype,
    has_one_element,
    is_call,
    number,
    tensor,
)

_FLOAT32_MAX = torch.finfo(torch.float32).max
# None of these changes a value, only where it stands.
_MOVES = RESHAPES | {aten.alias.default}


@dataclass(frozen=True, slots=True)
class Scale:
    """How the scale of a group comes from its largest absolute value: attributes of `quant_dynamic`."""

    source: fx.Node  # Whose largest absolute values these are.
    dims: tuple[int, ...]  # Over which; all of them: ().
    bound: fx.Node | None = None
    amax_min: float | None = None
    amax_max: float | None = None
    rule: str = ""
    divisor: float = 1.0
    scale_dtype: torch.dtype | None = None
    scale_min: float | None = None
    power_of_two: str = NO_POWER
    may_be_minus_zero: bool = False  # Until something bounds it from below.


def moved_from(node: fx.Node) -> fx.Node:
    """Look through reshapes."""
    while is_call(node, _MOVES):
        inner = node.args[0]
        assert isinstance(inner, fx.Node)
        node = inner
    return node


def read_scale(scale: fx.Node) -> Scale | Miss | None:
    """Read the scale's computation down to the largest absolute value. None: it does not come from one."""
    steps: list[fx.Node] = []
    node: fx.Node | None = scale
    while node is not None and (found := amax_of(node)) is None:
        steps.append(node)
        node = _next(node)
    if node is None or found is None:
        return None
    read: Scale | Miss = found
    for step in reversed(steps):
        if not isinstance(read, Miss) and not is_call(step, _MOVES):
            read = _apply(read, step)
    if isinstance(read, Miss):
        return read
    if not read.rule:
        return Miss(Reason.OTHER_SPELLING, "the scale is the largest absolute value itself")
    if read.may_be_minus_zero and max(read.amax_min or 0.0, read.scale_min or 0.0) <= 0.0:
        return Miss(Reason.OTHER_SPELLING, "the scale of a row of zeros is 0 or -0, which nothing bounds")
    if read.rule == INVERSE64 and dtype(scale) == torch.float64:
        return Miss(Reason.DTYPE, "the scale is float64")
    return read


def amax_of(node: fx.Node) -> Scale | None:
    """Read max(|x|) over some dimensions."""
    found = read_amax(node)
    return (
        None if found is None else Scale(found.source, found.dims, may_be_minus_zero=found.may_be_minus_zero)
    )


def _next(node: fx.Node) -> fx.Node | None:
    """Return the operand that a step works on."""
    inner: object = cast_source(node)
    if is_call(node, _MOVES | _STEPS):
        inner = node.args[0]
    elif is_call(node, aten.pow.Scalar):
        inner = node.args[1]
    elif is_call(node, aten.view.dtype):
        inner = source_of_bits(node)
    elif is_call(node, aten.minimum.default):
        one, other = node.args
        inner = next((a for a in (one, other) if isinstance(a, fx.Node) and not _is_bound(a)), None)
    return inner if isinstance(inner, fx.Node) else None


def _is_bound(node: fx.Node) -> bool:
    """Return whether this is a bound from outside: one float32 element."""
    value = tensor(node)
    return (
        value is not None
        and value.dtype == torch.float32
        and has_one_element(value)
        and not comes_from_amax(node)
    )


def comes_from_amax(node: fx.Node) -> bool:
    """Return whether a node is computed from a largest absolute value, one operand at a time."""
    following: fx.Node | None = node
    while following is not None and amax_of(following) is None:
        following = None if is_call(following, aten.minimum.default) else _next(following)
    return following is not None


def group_amax_behind(node: fx.Node, group: int) -> bool:
    """Return whether a node is computed from the largest absolute values of groups of this size.

    Looks back along what has more than one element: a scale of a group is combined with constants and with
    global scales.
    """
    following: fx.Node | None = node
    while following is not None:
        found = amax_of(following)
        if found is not None:
            value = found.source.meta["val"]
            return value.dim() > 1 and found.dims == (value.dim() - 1,) and value.shape[-1] == group
        if not (is_call(following, _MOVES | _STEPS) or cast_source(following) is not None):
            return False
        inputs = [one for one in following.all_input_nodes if (value := tensor(one)) is not None]
        wide = [one for one in inputs if not has_one_element(one.meta["val"])]
        following = wide[0] if len(wide) == 1 else None
    return False


_STEPS = frozenset(
    {
        aten.clamp_min.default,
        aten.clamp_max.default,
        aten.clamp.default,
        aten.div.Tensor,
        aten.mul.Tensor,
        aten.reciprocal.default,
        aten.log2.default,
        aten.ceil.default,
        aten.exp2.default,
        aten.abs.default,
    }
)


def _apply(read: Scale, step: fx.Node) -> Scale | Miss:
    """Take one more step, towards the scale."""
    if cast_source(step) is not None:
        return _apply_cast(read, step)
    if is_call(step, (aten.clamp_min.default, aten.clamp_max.default, aten.clamp.default)):
        for bound, value in _bounds(step):
            changed = _apply_bound(read, step, bound, value)
            if isinstance(changed, Miss):
                return changed
            read = changed
        return read
    if is_call(step, aten.minimum.default):
        bound_node = next(a for a in step.args if isinstance(a, fx.Node) and _is_bound(a))
        if read.bound is not None or read.rule or dtype(step) != torch.float32:
            return Miss(Reason.OTHER_SPELLING, f"{step.name} bounds the scale, not the largest value")
        return replace(read, bound=bound_node)
    if is_call(step, aten.abs.default):
        # What it was computed from is no less than 0.
        return read if read.divisor > 0 else Miss(Reason.OTHER_SPELLING, f"{step.name} turns the sign")
    if is_call(step, aten.view.dtype):
        rule = read_power(step)
        if rule is None or not read.rule or read.divisor <= 0 or read.power_of_two != NO_POWER:
            return Miss(Reason.OTHER_SPELLING, f"{step.name}: no power of two that is read here")
        return replace(read, power_of_two=rule)
    if is_call(step, (aten.log2.default, aten.ceil.default, aten.exp2.default, aten.pow.Scalar)):
        return _apply_power(read, step)
    return _apply_rule(read, step)


def _apply_cast(read: Scale, step: fx.Node) -> Scale | Miss:
    source = cast_source(step)
    before, after = dtype(source), dtype(step)
    assert before is not None
    assert after is not None
    if torch.promote_types(before, after) == after:
        return read  # Widening loses nothing.
    if not read.rule:
        return Miss(Reason.CAST_BETWEEN, f"{step.name} rounds the largest value to {after}")
    if before == torch.float64 and after == torch.float32:
        # A quotient of two float32 numbers is the same by way of float64 (53 bits >= 2 * 24 + 2).
        return read
    if (
        after in LOW_PRECISION
        and read.power_of_two == NO_POWER
        and read.scale_min is None
        and not read.scale_dtype
    ):
        return replace(read, scale_dtype=after)
    if after == read.scale_dtype and read.scale_min is not None and read.power_of_two == NO_POWER:
        # It was bounded in float32: of that only the bound is not in this dtype yet.
        return replace(read, scale_min=torch.tensor(read.scale_min).to(after).item())
    return Miss(Reason.CAST_BETWEEN, f"{step.name} rounds the scale to {after}")


def _bounds(clamp: fx.Node) -> Iterator[tuple[str, float | None]]:
    names = ("min", "max") if clamp.target == aten.clamp.default else (str(clamp.target).split("_")[1][:3],)
    given = dict(zip(names, clamp.args[1:], strict=False)) | clamp.kwargs
    for name, value in given.items():
        if value is not None:
            yield name, number(value)


def _apply_bound(read: Scale, step: fx.Node, bound: str, value: float | None) -> Scale | Miss:
    kind = dtype(step)
    assert kind is not None
    if value is None:
        return Miss(Reason.OTHER_SPELLING, f"{step.name} bounds by something that is not a constant")
    # A bound has the dtype of what it bounds.
    held = value if kind == torch.float64 else torch.tensor(value, dtype=kind).item()
    if not read.rule:
        if read.bound is not None:
            return Miss(Reason.OTHER_SPELLING, f"{step.name} bounds what was bounded by a tensor already")
        if bound == "min" and read.amax_min is None and (read.amax_max is None or held <= read.amax_max):
            return replace(read, amax_min=held)
        if bound == "max" and read.amax_max is None and (read.amax_min is None or read.amax_min <= held):
            return replace(read, amax_max=held)
    elif (
        bound == "min" and read.scale_min is None and read.power_of_two == NO_POWER and kind != torch.float64
    ):
        return replace(read, scale_min=held)
    elif bound == "max" and read.rule == INVERSE64 and held >= _FLOAT32_MAX and _is_below(read, held):
        return read
    return Miss(Reason.OTHER_SPELLING, f"{step.name} bounds once more")


def _is_below(read: Scale, bound: float) -> bool:
    """Return whether a reciprocal scale never reaches the bound, so that bounding it changes nothing."""
    return read.amax_min is not None and read.amax_min > 0 and read.divisor / read.amax_min < bound


def _apply_power(read: Scale, step: fx.Node) -> Scale | Miss:
    wrong = Miss(Reason.OTHER_SPELLING, f"{step.name}: no power of two that is read here")
    if not read.rule or dtype(step) != torch.float32:
        return wrong
    if is_call(step, aten.log2.default):
        return read if read.power_of_two == NO_POWER and len(step.users) == 1 else wrong
    if is_call(step, aten.ceil.default):
        return read if is_call(step.args[0], aten.log2.default) and len(step.users) == 1 else wrong
    if is_call(step, aten.pow.Scalar) and number(step.args[0]) != 2.0:
        return wrong
    exponent = step.args[1] if is_call(step, aten.pow.Scalar) else step.args[0]
    return replace(read, power_of_two=LOG2_POWER) if is_call(exponent, aten.ceil.default) else wrong


def _apply_rule(read: Scale, step: fx.Node) -> Scale | Miss:
    """Take a division by a number, a multiplication with one, or a reciprocal."""
    kind = dtype(step)
    if is_call(step, aten.reciprocal.default):
        if read.rule or kind not in (torch.float32, torch.float64):
            return Miss(Reason.OTHER_SPELLING, f"{step.name} inverts the scale in {kind}")
        user = next((u for u in step.users if is_call(u, aten.mul.Tensor)), None)
        if user is None or number(user.args[1]) is None:
            return Miss(Reason.OTHER_SPELLING, f"{step.name} inverts the largest value alone")
        return replace(read, rule=INVERSE if kind == torch.float32 else INVERSE64)
    constant = number(step.args[1]) if len(step.args) > 1 else None
    if constant is None:
        return Miss(Reason.OTHER_SPELLING, f"{step.name} scales by something that is not a constant")
    if read.rule in (INVERSE, INVERSE64) and read.divisor == 1.0 and is_call(step, aten.mul.Tensor):
        return replace(read, divisor=constant)
    if read.rule:
        return Miss(Reason.OTHER_SPELLING, f"{step.name} scales once more")
    rule = DIVIDE if is_call(step, aten.div.Tensor) else MULTIPLY
    if kind == torch.float64:
        bounds = (read.amax_min, read.amax_max, constant)
        if rule == MULTIPLY or any(
            b is not None and torch.tensor(b, dtype=torch.float32).item() != b for b in bounds
        ):
            return Miss(Reason.DTYPE, "the scale is computed in float64")
    scale_dtype = kind if kind in LOW_PRECISION else None
    return replace(read, rule=rule, divisor=constant, scale_dtype=scale_dtype)
