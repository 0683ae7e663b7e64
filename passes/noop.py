"""No-op elimination: views and copies that give back what they were given, and views of views.

A view that changes nothing *is* its source, so it can always go. A copy is a snapshot: it goes by the rule of
`copies.py`. Sizes are compared without adding guards.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fuse_cache.passes.aliasing import Aliasing
from fuse_cache.passes.base import Outcome, Pass, Setting
from fuse_cache.passes.copies import COPIES, copied, is_needless
from fuse_cache.passes.verify import same_layout

aten = torch.ops.aten

# Each returns the storage of its first argument. With equal sizes, strides and offset it is the same tensor.
_VIEWS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.expand.default,
        aten.permute.default,
        aten.slice.Tensor,
        aten.alias.default,
        aten.squeeze.dims,
        aten.squeeze.dim,
    }
)
_RESHAPES = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})


def _run(graph: fx.Graph, setting: Setting) -> Outcome:
    outcome = Outcome()
    aliasing = Aliasing(graph)
    returned = set(graph.output_node().all_input_nodes)
    for node in list(graph.nodes):
        if node.op != "call_function" or (node.target not in _VIEWS and node.target not in COPIES):
            continue
        outcome.candidates += 1
        source = _source(node)
        if source is not None and _does_nothing(node, source, aliasing, returned=node in returned):
            node.replace_all_uses_with(source)
            aliasing.join(node, source)
            graph.erase_node(node)
            outcome.matches += 1
        elif _skip_inner_reshape(node):
            outcome.matches += 1
    return outcome


def _source(node: fx.Node) -> fx.Node | None:
    """Return the argument that the node gives back if it does nothing; None if it does something."""
    if node.target in COPIES:
        return copied(node)
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    value, before = node.meta.get("val"), source.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(before, torch.Tensor):
        return None
    return source if same_layout(value, before) else None


def _does_nothing(node: fx.Node, source: fx.Node, aliasing: Aliasing, *, returned: bool) -> bool:
    if node.target in COPIES:
        return is_needless(node, source, aliasing)
    offset, before = node.meta["val"].storage_offset(), source.meta["val"].storage_offset()
    return not returned and bool(statically_known_true(offset == before))


def _skip_inner_reshape(node: fx.Node) -> bool:
    """Let a reshape of a reshape read the inner one's source, if contiguous: any shape is a view of it."""
    inner = node.args[0]
    if node.target not in _RESHAPES or not isinstance(inner, fx.Node) or inner.target not in _RESHAPES:
        return False
    source = inner.args[0]
    if not isinstance(source, fx.Node) or not _is_contiguous(source.meta.get("val")):
        return False
    if not _is_contiguous(node.meta.get("val")):
        return False
    node.replace_input_with(inner, source)
    return True


def _is_contiguous(value: object) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    expected: int | torch.SymInt = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not statically_known_true(stride == expected):
            return False
        expected = expected * size
    return True


PASS = Pass(name="eliminate_noops", run=_run)
