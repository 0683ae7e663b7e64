"""Reads the mean of the squares under a root, and what is added to it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fuse_cache.passes.base import Reason
from fuse_cache.passes.raised import Miss
from fuse_cache.passes.reading import (
    LOW_PRECISION,
    aten,
    cast_source,
    dtype,
    is_call,
    number,
    reshape_source,
    tensor,
)

_CLAMPS = (aten.clamp_min.default, aten.clamp.default, aten.maximum.default, aten.clamp_min.Tensor)
_ADDS = (aten.add.Tensor, aten.add.Scalar)
_STEPS = frozenset(
    {
        *_CLAMPS,
        *_ADDS,
        aten.mean.dim,
        aten.mean.default,
        aten.sum.dim_IntList,
        aten.div.Tensor,
        aten.mul.Tensor,
    }
)
# A mean, a cast, a reshape, eps and a bound, and one more.
_MOST_STEPS = 6


@dataclass(frozen=True, slots=True)
class Path:
    """The nodes from the squares of `base` (which are none of them) to what the root is taken of."""

    base: fx.Node
    steps: tuple[fx.Node, ...]


def path_to_squares(node: fx.Node, most: int = _MOST_STEPS) -> Path | None:
    """Return the path from the squares that a root is taken of. None: there are none."""
    base = _squared(node)
    if base is not None:
        return Path(base, ())
    if most == 0 or not (is_call(node, _STEPS) or cast_source(node) or reshape_source(node)):
        return None
    for inner in node.all_input_nodes:
        path = path_to_squares(inner, most - 1)
        if path is not None:
            return Path(path.base, (*path.steps, node))
    return None


def read_variance(path: Path) -> float | Miss | None:
    """Return eps of mean(squares) + eps; 0.0 where nothing is added. None: nothing is averaged or summed."""
    reduced = next((step for step in path.steps if _is_reduction(step)), None)
    if reduced is None:
        return None
    eps = 0.0
    for step in path.steps:
        if step is reduced:
            wrong = _wrong_reduction(path, step)
        elif is_call(step, _ADDS) and eps == 0.0:
            constant = number(step.args[1])
            if constant is None or step.kwargs:  # Such as alpha, by which eps is multiplied.
                return Miss(Reason.OTHER_SPELLING, "eps is not a constant")
            eps, wrong = constant, None
        else:
            wrong = _wrong_step(step)
        if wrong is not None:
            return wrong
    return eps


def _squared(node: object) -> fx.Node | None:
    """Return h of h.pow(2) or h * h."""
    by_power = is_call(node, aten.pow.Tensor_Scalar) and number(node.args[1]) == 2.0
    by_product = is_call(node, aten.mul.Tensor) and node.args[0] is node.args[1]
    base = node.args[0] if isinstance(node, fx.Node) and (by_power or by_product) else None
    return base if isinstance(base, fx.Node) else None


def _is_reduction(node: fx.Node) -> bool:
    return is_call(node, (aten.mean.dim, aten.mean.default, aten.sum.dim_IntList))


def _wrong_reduction(path: Path, step: fx.Node) -> Miss | None:
    value = tensor(path.base)
    if value is None or value.dim() == 0:
        return Miss(Reason.OTHER_SPELLING, "what is squared is no tensor of rows")
    if is_call(step, aten.sum.dim_IntList):
        return _sum_reason(path, step)
    if dtype(step) in LOW_PRECISION and dtype(path.base) not in LOW_PRECISION:
        return Miss(Reason.CAST_BETWEEN, f"{step.name} rounds the mean to {dtype(step)}")
    dims = step.args[1] if len(step.args) > 1 else []
    keepdim = len(step.args) > 2 and step.args[2] is True
    if dims in ([-1], [value.dim() - 1]) and keepdim:
        return None
    detail = f"the mean is over {dims}, keepdim {keepdim}: not the last dimension"
    return Miss(Reason.OTHER_SPELLING, detail)


def _sum_reason(path: Path, step: fx.Node) -> Miss:
    """Say what is wrong with a sum: nothing divides it, or a number does, which may be the size of a row."""
    quotient = next((user for user in path.steps if is_call(user, (aten.div.Tensor, aten.mul.Tensor))), None)
    divisor = None if quotient is None else number(quotient.args[1])
    if quotient is None or divisor is None:
        return Miss(Reason.OTHER_SPELLING, f"{step.name} adds the squares up: they are not averaged")
    width = path.base.meta["val"].shape[-1]
    by_width = divisor in (width, 1 / width) if isinstance(width, int) and width > 0 else False
    if by_width:
        detail = f"the mean is a sum, divided by the number {width}: a size is burnt in. mean(-1) has its own"
        return Miss(Reason.SIZE_BURNT_IN, detail)
    return Miss(Reason.OTHER_SPELLING, f"the mean is a sum, divided by {divisor}")


def _wrong_step(step: fx.Node) -> Miss | None:
    source = cast_source(step)
    if source is not None and dtype(source) in LOW_PRECISION:
        return None  # Widening loses nothing.
    if source is not None:
        detail = f"{step.name} rounds {source.name} to {dtype(step)} before the root"
        return Miss(Reason.CAST_BETWEEN, detail)
    if reshape_source(step) is not None:
        return Miss(Reason.EXTRA_VIEW, f"{step.name} reshapes the mean before the root")
    if is_call(step, _CLAMPS):
        return Miss(Reason.OTHER_SPELLING, f"{step.name} bounds the mean: nothing small is added to it")
    return Miss(Reason.OTHER_SPELLING, f"{step.name} changes the mean once more")
