"""Inputs that share memory, of which one is written.

Which of them overlap, and where, decides what the compiled code does. With varying sizes it differs from call
to call: such a graph has no key, and AOTAutograd guards it where it runs in the host. With fixed sizes the
offsets are burnt in, and Dynamo guards neither them nor that memory is shared at all: each call is checked.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence, Set
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from fuse_cache.client.graph_values import value_of
from fuse_cache.proto.expression import SymExpr
from fuse_cache.proto.graph import Input, TensorMeta

_WRITING_OPERATORS: Final = frozenset(
    {
        operator.setitem,
        operator.iadd,
        operator.iand,
        operator.ifloordiv,
        operator.ilshift,
        operator.imatmul,
        operator.imod,
        operator.imul,
        operator.ior,
        operator.ipow,
        operator.irshift,
        operator.isub,
        operator.itruediv,
        operator.ixor,
    }
)


def writes_varying_aliases(gm: GraphModule, inputs: Sequence[Input]) -> bool:
    """Say whether `gm` may write to an input whose storage another input shares, where sizes of theirs vary.

    `inputs` are the encoded ones, of which the placeholders come first.
    """
    varying = {entry.alias_group for entry in inputs if entry.alias_group and _varies(entry)}
    return bool(_written(gm, inputs, varying))


class SharedMemory:
    """Says of a call's arguments whether they share memory as those did that a graph was traced with.

    False as a whole where that changes nothing: no input shares its memory with one that may be written.
    """

    def __init__(self, gm: GraphModule, inputs: Sequence[Input]) -> None:
        groups = {entry.alias_group for entry in inputs if entry.alias_group}
        written = _written(gm, inputs, groups)
        # Per group, (place of an input, its storage offset in elements).
        self._groups: list[list[tuple[int, int]]] = [
            [
                (place, entry.meta.storage_offset)
                for place, entry in enumerate(inputs)
                if entry.alias_group == group
                and isinstance(entry.meta, TensorMeta)
                and isinstance(entry.meta.storage_offset, int)
            ]
            for group in sorted(written)
        ]

    def __bool__(self) -> bool:
        return bool(self._groups)

    def same(self, args: Sequence[Any]) -> bool:
        """Say whether these tensors share memory in the same groups, each at the same offset."""
        seen = set()
        for group in self._groups:
            storage = args[group[0][0]].untyped_storage()._cdata
            if storage in seen or any(
                args[place].untyped_storage()._cdata != storage or args[place].storage_offset() != offset
                for place, offset in group
            ):
                return False
            seen.add(storage)
        return True

    def checked(
        self, run: Callable[..., Any], plain: Callable[..., Any], told: Callable[[str], None]
    ) -> Callable[..., Any]:
        """Return `run` for calls that share memory as when traced; `plain` runs the others, `told` once why.

        No compiled code would do: the next such call may share in yet another way, and Dynamo asks nobody.
        """
        tell = functools.cache(told)

        def call(*args: Any) -> Any:
            if self.same(args):
                return run(*args)
            tell("inputs share memory otherwise than when the graph was traced, and one is written")
            return plain(*args)

        return call


def _written(gm: GraphModule, inputs: Sequence[Input], groups: Set[int]) -> set[int]:
    """Return those of these alias groups of which `gm` may write an input."""
    if not groups:
        return set()
    placeholders = gm.graph.find_nodes(op="placeholder")
    group_of = {
        _storage(node): entry.alias_group
        for node, entry in zip(placeholders, inputs, strict=False)  # constants come after them
        if entry.alias_group in groups
    }
    return {
        group_of[storage]
        for node in gm.graph.nodes
        if _may_write(node)
        for argument in node.all_input_nodes
        if (storage := _storage(argument)) in group_of
    }


def _varies(entry: Input) -> bool:
    meta = entry.meta
    return isinstance(meta, TensorMeta) and any(
        isinstance(dim, SymExpr) for dim in (*meta.size, *meta.stride, meta.storage_offset)
    )


def _storage(node: FxNode) -> int | None:
    value = value_of(node)
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _may_write(node: FxNode) -> bool:
    """Say whether a call may write to an argument, rather too often than too rarely."""
    target = node.target
    if node.op == "call_method":
        return str(target).endswith("_")
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    name = str(getattr(target, "__name__", ""))
    return (
        target in _WRITING_OPERATORS
        or name.endswith("_")
        or isinstance(target, torch._ops.OpOverloadPacket)
        or "out" in node.kwargs
        or any(argument is True for argument in (*node.args, *node.kwargs.values()))  # inplace=True
    )
