"""Reads what stands between a scaled value and its code: a rounding to integers, bounds, casts."""

from __future__ import annotations

from torch import fx

from fuse_cache.passes.base import Reason
from fuse_cache.passes.raised import Miss
from fuse_cache.passes.reading import LOW_PRECISION, aten, cast_source, dtype, is_call, number, widened_from

_CLAMPS = (aten.clamp_min.default, aten.clamp_max.default, aten.clamp.default)


def read_codes(node: fx.Node, *, is_integer: bool) -> tuple[fx.Node, float | None, float | None] | Miss:
    """Look through [a cast], [clamps], [a widening cast]; return what was clamped, and the bounds.

    Where PyTorch clamps bfloat16 it widens first and narrows last: both lose nothing, as bounds are exact.
    Integer codes are rounded too, before the clamps or behind them: with integers for bounds it is the same.
    """
    top, rounded_to = node, None
    source = cast_source(node)
    if source is not None and dtype(node) in LOW_PRECISION and _is_clamp(source):
        top, rounded_to = source, dtype(node)
    lower: float | None = None
    upper: float | None = None
    was_rounded = False
    while _is_clamp(top) or (is_integer and is_call(top, aten.round.default)):
        inner = top.args[0]
        if not isinstance(inner, fx.Node):
            return Miss(Reason.OTHER_SPELLING, f"{top.name} has no tensor to work on")
        if is_call(top, aten.round.default):
            if was_rounded:
                return Miss(Reason.OTHER_SPELLING, "it is rounded to integers twice")
            was_rounded, top = True, inner
            continue
        new_lower, new_upper = _bounds(top)
        if (new_lower is not None and lower is not None) or (new_upper is not None and upper is not None):
            return Miss(Reason.OTHER_SPELLING, "it is clamped twice")
        lower = new_lower if lower is None else lower
        upper = new_upper if upper is None else upper
        # An integer that is narrow stays what it is.
        is_wide_round = is_integer and is_call(widened_from(inner), aten.round.default)
        top = widened_from(inner) if is_wide_round else inner
    if lower is not None and upper is not None and lower > upper:
        return Miss(Reason.OTHER_SPELLING, f"the bounds {lower} and {upper} are crossed")
    if is_integer and any(bound is not None and bound != int(bound) for bound in (lower, upper)):
        return Miss(Reason.OTHER_SPELLING, f"a bound of {lower} and {upper} is no integer")
    top = widened_from(top)
    if rounded_to is not None and dtype(top) != rounded_to:
        return Miss(Reason.CAST_BETWEEN, f"the clamped value is rounded to {rounded_to} before the cast")
    return top, lower, upper


def _is_clamp(node: fx.Node) -> bool:
    return is_call(node, _CLAMPS) and all(
        argument is None or number(argument) is not None
        for argument in (*node.args[1:], *node.kwargs.values())
    )


def _bounds(clamp: fx.Node) -> tuple[float | None, float | None]:
    given = (
        {"min": None, "max": None} | dict(zip(("min", "max"), clamp.args[1:], strict=False)) | clamp.kwargs
    )
    if clamp.target == aten.clamp_min.default:
        return number(given["min"]), None
    if clamp.target == aten.clamp_max.default:
        return None, number(given.get("max") if given["max"] is not None else given["min"])
    return number(given["min"]), number(given["max"])
