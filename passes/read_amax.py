"""Reads the largest absolute value of a tensor, or of each of its rows, however it is computed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fuse_cache.passes.reading import aten, is_call, number, widened_from

_CONSTANTS = (aten.full.default, aten.full_like.default)


@dataclass(frozen=True, slots=True)
class Amax:
    """max(|x|) over some dimensions of `source`; over all of them: ().

    `may_be_minus_zero`: what gives it for a row of zeros is the larger one of -0 and 0, which either may be.
    """

    source: fx.Node
    dims: tuple[int, ...]
    may_be_minus_zero: bool = False


def read_amax(node: fx.Node) -> Amax | None:
    """Read amax(|x|) or max(|x|), or max(-min(x), max(x)) with the two held apart by zero.

    Source of the latter: torchao's choose_qparams for symmetric mappings.
    """
    if is_call(node, aten.maximum.default):
        return _of_range(node)
    found = _reduced(node, aten.amax.default) or _by_max(node)
    if found is None:
        return None
    inner, dims = found
    inner = widened_from(inner)
    if not is_call(inner, aten.abs.default) or not isinstance(inner.args[0], fx.Node):
        return None
    source = widened_from(inner.args[0])
    return Amax(source, _sorted(source, dims))


def _reduced(node: object, target: object) -> tuple[fx.Node, tuple[int, ...]] | None:
    if not isinstance(node, fx.Node) or node.op != "call_function" or node.target != target:
        return None
    given = node.args[1] if len(node.args) > 1 else []
    assert isinstance(given, (list, tuple))
    inner = node.args[0]
    assert isinstance(inner, fx.Node)
    return inner, tuple(place for place in given if isinstance(place, int))


def _by_max(node: fx.Node) -> tuple[fx.Node, tuple[int, ...]] | None:
    """x.max() or x.max(dim).values"""
    if is_call(node, aten.max.default):
        return node.all_input_nodes[0], ()
    if getattr(node.target, "__name__", "") != "getitem" or not is_call(node.args[0], aten.max.dim):
        return None
    call = node.args[0]
    return (call.all_input_nodes[0], (int(call.args[1]),)) if node.args[1] == 0 else None  # type: ignore[arg-type]  # the schema says int


def _of_range(node: fx.Node) -> Amax | None:
    """maximum(neg(minimum(amin(x), 0)), maximum(amax(x), 0))"""
    for low, high in ((node.args[0], node.args[1]), (node.args[1], node.args[0])):
        if not is_call(low, aten.neg.default):
            continue
        least = _reduced(_beside_zero(low.args[0], aten.minimum.default), aten.amin.default)
        most = _reduced(_beside_zero(high, aten.maximum.default), aten.amax.default)
        if least is None or most is None:
            continue
        one, other = (widened_from(inner) for inner, _ in (least, most))
        dims = _sorted(one, least[1])
        if one is other and dims == _sorted(other, most[1]):
            return Amax(one, dims, may_be_minus_zero=True)
    return None


def _beside_zero(node: object, target: object) -> fx.Node | None:
    """Return what a minimum or maximum holds against zero."""
    if not isinstance(node, fx.Node) or node.target != target:
        return None
    one, other = node.args
    if _is_zero(one):
        one, other = other, one
    return one if _is_zero(other) and isinstance(one, fx.Node) else None


def _is_zero(node: object) -> bool:
    return is_call(node, _CONSTANTS) and number(node.args[1]) == 0.0


def _sorted(source: fx.Node, dims: tuple[int, ...]) -> tuple[int, ...]:
    rank = source.meta["val"].dim()
    return tuple(sorted(place % rank for place in dims))
