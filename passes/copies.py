"""When a copy can go: its readers then read what was copied.

A copy is a snapshot. It is needless if the two have one layout, nobody writes to the copy, and nobody writes
to the source as long as the copy is read. A copy that is returned has to be memory of its own: the source
must be no input and no constant, no view, and not be returned itself.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fuse_cache.passes.aliasing import Aliasing, argument_effects
from fuse_cache.passes.reading import aten, prims
from fuse_cache.passes.verify import same_layout

# Each returns fresh storage, with the values of the argument at this place if dtype and sizes agree.
COPIES = {
    aten.clone.default: 0,
    aten._to_copy.default: 0,
    prims.convert_element_type.default: 0,
    aten.copy.default: 1,
    aten.slice_scatter.default: 1,
}
# They count from the start of the storage, where a copy begins and its source need not.
_BY_STORAGE = frozenset(
    {aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default}
)


def copied(node: fx.Node) -> fx.Node | None:
    """Return what a node copies without changing dtype, sizes or strides; None if it does anything else."""
    place = COPIES.get(node.target) if node.op == "call_function" else None  # type: ignore[call-overload]  # targets are hashable
    source = node.args[place] if place is not None and place < len(node.args) else None
    if not isinstance(source, fx.Node):
        return None
    value, before = node.meta.get("val"), source.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(before, torch.Tensor):
        return None
    return source if same_layout(value, before) else None


def is_needless(node: fx.Node, source: fx.Node, aliasing: Aliasing) -> bool:
    """Return whether the readers of the copy `node` may read its source."""
    readers = [user for member in _living(node, aliasing) for user in member.users]
    if aliasing.is_written(node) or any(reader.target in _BY_STORAGE for reader in readers):
        return False
    is_returned = any(reader.op == "output" for reader in readers)
    until = None if is_returned else aliasing.last_reader(node)
    if aliasing.is_written(source, after=node, until=until):
        return False
    if is_returned and not _is_fresh(source, aliasing):
        return False
    return _starts_alike(node, source) or all(_is_of_torch(reader) for reader in readers)


def _living(node: fx.Node, aliasing: Aliasing) -> list[fx.Node]:
    return [member for member in aliasing.members(node) if not member._erased]


def _is_fresh(source: fx.Node, aliasing: Aliasing) -> bool:
    """Return whether the source is whole memory that the graph made and that it does not return yet."""
    family = _living(source, aliasing)
    if source.op != "call_function" or argument_effects(source)[0]:
        return False
    if any(member.op != "call_function" for member in family):
        return False
    return not any(user.op == "output" for member in family for user in member.users)


def _starts_alike(node: fx.Node, source: fx.Node) -> bool:
    offsets = (one.meta["val"].storage_offset() for one in (node, source))
    return bool(statically_known_true(next(offsets) == next(offsets)))


def _is_of_torch(reader: fx.Node) -> bool:
    """Return whether the reader takes its operand at any address: other libraries' kernels may want the
    alignment of a fresh tensor."""
    return isinstance(reader.target, OpOverload) and reader.target.namespace in ("aten", "prims")
