"""Inputs that share memory, where one of them is written and sizes vary: a graph for them has no key.

Which of them overlap decides what the compiled code may do, and with varying sizes it differs from call to
call. AOTAutograd guards that where it runs in the host; a daemon chooses sizes of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Final

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
    if not varying:
        return False
    placeholders = gm.graph.find_nodes(op="placeholder")
    shared = {
        _storage(node)
        for node, entry in zip(placeholders, inputs, strict=False)  # constants come after them
        if entry.alias_group in varying
    }
    return any(
        _may_write(node) and any(_storage(argument) in shared for argument in node.all_input_nodes)
        for node in gm.graph.nodes
    )


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
