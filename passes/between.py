"""What stands between a producer and a quantisation that could have been fused with it, in words."""

from __future__ import annotations

import operator
from collections import deque
from dataclasses import dataclass

import torch
from torch import fx
from torch._ops import OpOverload

from fuse_cache.kernels.fused_quant.op import PRODUCERS, QUANTISERS
from fuse_cache.passes.base import Reason
from fuse_cache.passes.reading import (
    FLOAT8,
    FLOATS,
    aten,
    cast_source,
    dtype,
    is_call,
    is_symbolic,
    reshape_source,
    tensor,
)

_CODES = FLOAT8 | {torch.int8, torch.uint8}
_ATTENTION = "scaled_dot_product"
# How far behind a producer a quantisation that was not recognised is looked for, in nodes: the longest
# spelling of one has some thirty.
_ALL = 1 << 62  # What a slice has for its end that goes to the last row, and more.
_MOST_STEPS = 64


@dataclass(frozen=True, slots=True)
class Between:
    """`origin` is what a quantisation reads once all that only moves or rounds values is taken away.

    `obstacle` says what of that stands nearest to the quantisation; None where nothing does.
    """

    origin: fx.Node
    obstacle: tuple[Reason, str] | None


def look_behind(source: fx.Node) -> Between:
    """Look behind casts, reshapes and the like, and through the choice of a producer's first result."""
    node, obstacle = source, None
    while True:
        inner, found = _step(node)
        if inner is None:
            return Between(node, obstacle)
        obstacle = obstacle or found
        node = inner


def _step(node: fx.Node) -> tuple[fx.Node | None, tuple[Reason, str] | None]:
    """Return what the node moves or rounds, and why that is in the way. (None, None): it computes."""
    if node.target is operator.getitem:
        call = node.all_input_nodes[0]
        return (call, None) if node.args[1] == 0 and is_call(call, PRODUCERS) else (None, None)
    inner = cast_source(node)
    if inner is not None:
        detail = f"{node.name} casts {inner.name} to {dtype(node)} first"
        return (inner, (Reason.CAST_BETWEEN, detail)) if dtype(node) in FLOATS else (None, None)
    inner = reshape_source(node)
    if inner is not None:
        return inner, (Reason.EXTRA_VIEW, f"{node.name} reshapes {inner.name} first")
    if is_call(node, aten.slice.Tensor):
        return node.all_input_nodes[0], _slice_obstacle(node)
    if is_call(node, aten.constant_pad_nd.default):
        inner = node.all_input_nodes[0]
        before, after = (_width(one) for one in (inner, node))
        return inner, (Reason.SHAPE, f"{node.name} pads {inner.name} from {before} to {after} columns first")
    if is_call(node, (aten.permute.default, aten.clone.default, aten.expand.default)):
        inner = node.all_input_nodes[0]
        return inner, (Reason.EXTRA_VIEW, f"{node.name} moves the values of {inner.name} first")
    return None, None


def _slice_obstacle(node: fx.Node) -> tuple[Reason, str]:
    """Say what a slice takes of its operand: a number of rows that is always the same, or another part."""
    inner = node.all_input_nodes[0]
    rows, taken = tensor(inner), tensor(node)
    dim = node.args[1] if len(node.args) > 1 else 0
    if rows is not None and taken is not None and isinstance(dim, int) and is_symbolic(inner):
        before, after = rows.shape[dim], taken.shape[dim]
        end = node.args[3] if len(node.args) > 3 else None
        # Traced size-obliviously a slice of four rows has min(4, T) of them: then its end is the size.
        burnt = after if isinstance(after, int) else end if isinstance(end, int) and 0 < end < _ALL else None
        if isinstance(before, torch.SymInt) and burnt is not None:
            detail = f"{node.name} takes {burnt} of {inner.name}'s {before} rows: a size is burnt in"
            return Reason.SIZE_BURNT_IN, detail
    return Reason.EXTRA_VIEW, f"{node.name} takes a part of {inner.name} first"


def _width(node: fx.Node) -> int | torch.SymInt | None:
    value = tensor(node)
    return None if value is None or value.dim() == 0 else value.shape[-1]


def orphan_reason(origin: fx.Node, source: fx.Node) -> tuple[Reason, str]:
    """Say why a quantisation has no producer; `origin` is what stands behind its `source`."""
    call = origin.all_input_nodes[0] if origin.target is operator.getitem else origin
    if _ATTENTION in str(call.target):
        return Reason.OP_MISSING, "no attention kernel with an output scale on this target"
    if call is not origin and is_call(call, PRODUCERS):
        return Reason.NO_PARTNER, f"it reads {source.name}, the sum before the norm {call.name}"
    of_whom = f"{source.name} ({call.target})" if isinstance(call.target, OpOverload) else source.name
    return Reason.NO_PARTNER, f"it reads {of_whom}, which is neither a norm nor a gated activation"


def unread_quantisation(producer: fx.Node) -> tuple[Reason, str]:
    """Say why a producer has no quantisation: there is none, or it is spelled in a way that is not read."""
    waiting, seen = deque(producer.users), {producer}
    while waiting and len(seen) < _MOST_STEPS:
        node = waiting.popleft()
        if node in seen or is_call(node, PRODUCERS) or is_call(node, QUANTISERS):
            continue
        seen.add(node)
        if cast_source(node) is not None and dtype(node) in _CODES:
            detail = f"{node.name} quantises it in a way that is not read here: see the near miss of raise_ir"
            return Reason.OTHER_SPELLING, detail
        if node.target is operator.getitem or _is_pointwise(node) or _step(node)[0] is not None:
            waiting.extend(node.users)
    return Reason.NO_PARTNER, "no quantisation reads it"


def _is_pointwise(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or cast_source(node) is not None
