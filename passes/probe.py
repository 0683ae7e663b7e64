"""Runs the part of a graph that computes each element from one element, on chosen values.

What a graph does to the bits of a number has many spellings and few meanings: it is recognised by what comes
out. Every constant of the part, its neighbours and its negative are for the caller to try (`constants`), so
that a threshold that lies elsewhere is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from fuse_cache.passes.reading import RESHAPES, aten, prims

_MAX_NODES = 120
_MAX_CONSTANT = 64  # elements
# They give back what they are given: on a row of values there is nothing to move.
_SAME = RESHAPES | {
    aten.clone.default,
    aten.alias.default,
    aten.expand.default,
    aten.lift_fresh_copy.default,
    prims.device_put.default,
}
_ELEMENTWISE = frozenset(
    {
        prims.convert_element_type.default,
        aten._to_copy.default,
        aten.view.dtype,
        aten.bucketize.Tensor,
        aten.searchsorted.Tensor,
        aten.where.self,
        aten.where.ScalarOther,
        aten.where.ScalarSelf,
    }
)
_CONSTANTS = frozenset(
    {
        aten.full.default,
        aten.full_like.default,
        aten.zeros.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.scalar_tensor.default,
    }
)


@contextmanager
def no_modes() -> Iterator[None]:
    """Compute on real tensors: in Inductor's hooks a mode is on that makes everything fake."""
    with _disable_current_modes(), torch.no_grad():
        yield


@dataclass(frozen=True, slots=True)
class Part:
    """The nodes between `source` and `last`, in the order in which they run, without the source.

    What computes on real tensors (`key`, `run`, `constants`) is called with `no_modes`.
    """

    source: fx.Node
    nodes: tuple[fx.Node, ...]
    last: fx.Node

    def key(self) -> str:
        """Return a text that is equal for parts that compute the same in the same steps."""
        numbers = {node: place for place, node in enumerate((self.source, *self.nodes))}
        lines = []
        for node in self.nodes:
            if node.op == "get_attr":
                table = _attribute(node)
                lines.append(f"{table.dtype} {table.tolist()}")
            elif node.target in _CONSTANTS:
                lines.append(f"{_fill(node)} {node.meta['val'].dtype}")
            elif node.target in _SAME:
                lines.append(f"same {numbers[_inputs(node)[0]]}")
            else:
                lines.append(f"{node.target} {fx.map_arg((node.args, node.kwargs), numbers.__getitem__)}")
        return "\n".join(lines)

    def run(self, values: Tensor) -> Tensor | None:
        """Return what the last node computes of these values, None if the part cannot be run on them."""
        known: dict[fx.Node, Any] = {self.source: values}
        try:
            for node in self.nodes:
                known[node] = _compute(node, known, values)
        except (RuntimeError, TypeError, NotImplementedError):
            return None
        found = known[self.last]
        return found if isinstance(found, Tensor) and found.shape == values.shape else None

    def constants(self) -> list[float]:
        """Return every number that the part holds."""
        found: list[float] = []
        for node in self.nodes:
            if node.op == "get_attr":
                found += _attribute(node).double().flatten().tolist()
                continue
            waiting = [*node.args, *node.kwargs.values()]
            while waiting:
                one = waiting.pop()
                if isinstance(one, (list, tuple)):
                    waiting += one
                elif isinstance(one, (int, float)) and not isinstance(one, bool):
                    found.append(float(one))
        return found


def part_behind(last: fx.Node, is_source: Callable[[fx.Node], bool]) -> Part | None:
    """Collect what `last` is computed from, back to the one node that is the source.

    None: there is another source, or a step that does not work element by element.
    """
    sources: set[fx.Node] = set()
    nodes: set[fx.Node] = set()
    waiting = [last]
    while waiting:
        node = waiting.pop()
        if node in nodes or node in sources:
            continue
        if is_source(node):
            sources.add(node)
            continue
        if not _is_allowed(node) or len(nodes) >= _MAX_NODES:
            return None
        nodes.add(node)
        waiting.extend(_inputs(node))
    if len(sources) != 1:
        return None
    (source,) = sources
    return Part(source, tuple(sorted(nodes)), last)


def _inputs(node: fx.Node) -> list[fx.Node]:
    """Return whose elements a node reads: not what its sizes are computed from."""
    if node.target in _CONSTANTS:
        return []
    return node.all_input_nodes[:1] if node.target in _SAME else node.all_input_nodes


def _is_allowed(node: fx.Node) -> bool:
    if node.op == "get_attr":
        value = getattr(node.graph.owning_module, str(node.target), None)
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor) or value.is_meta:
            return False  # It has no values.
        return value.numel() <= _MAX_CONSTANT
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if node.target in (aten.bucketize.Tensor, aten.searchsorted.Tensor):
        return True
    if node.target == aten.index_put.default:
        return True
    return (
        node.target in _SAME
        or node.target in _ELEMENTWISE
        or node.target in _CONSTANTS
        or torch.Tag.pointwise in node.target.tags
    )


def _attribute(node: fx.Node) -> Tensor:
    value = getattr(node.graph.owning_module, str(node.target))
    assert isinstance(value, Tensor)
    return value.detach().cpu()


def _compute(node: fx.Node, known: dict[fx.Node, Any], values: Tensor) -> Any:
    if node.op == "get_attr":
        return _attribute(node)
    target = node.target
    assert isinstance(target, OpOverload)
    if target in _CONSTANTS:
        return _constant(node, values)
    if target in _SAME:
        return known[_inputs(node)[0]]
    args = fx.map_arg(node.args, known.__getitem__)
    kwargs = {
        key: value
        for key, value in fx.map_arg(node.kwargs, known.__getitem__).items()
        if key not in ("device", "layout", "pin_memory", "memory_format")
    }
    return target(*args, **kwargs)


def _constant(node: fx.Node, values: Tensor) -> Tensor:
    """Return a constant of the size of the values, or of one element if it is no more."""
    value = node.meta["val"]
    return torch.full(values.shape if value.dim() else (), _fill(node), dtype=value.dtype)


def _fill(node: fx.Node) -> Any:
    if node.target in (aten.full.default, aten.full_like.default):
        return node.args[1]
    if node.target == aten.scalar_tensor.default:
        return node.args[0]
    return int(node.target == aten.ones_like.default)
