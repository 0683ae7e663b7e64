"""Flattens the operands of a norm or a gated activation instead of its result, where a quantisation reads
that flattened: what stood between the two is then gone.

Linear layers flatten [batch, sequence, hidden] before they quantise. Rows stay rows, so that nothing changes
in value. What else reads the result, and the sum of an addition, is given its sizes back.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fuse_cache.kernels.fused_quant.op import PRODUCERS, QUANTISERS
from fuse_cache.passes.base import Outcome, Pass, Setting
from fuse_cache.passes.merge import merge_equal
from fuse_cache.passes.reading import aten, is_call, reshape_source, tensor
from fuse_cache.passes.rewrite import erase_dead, insert_call


def _run(graph: fx.Graph, setting: Setting) -> Outcome:
    outcome = Outcome()
    for node in list(graph.nodes):
        if not is_call(node, PRODUCERS):
            continue
        results = _results(node)
        first = results.get(0)
        flat = None if first is None else next((user for user in first.users if _is_flat(user, first)), None)
        if first is None or flat is None:
            continue
        outcome.candidates += 1
        if all(_has_even_rows(operand) for operand in _operands(node)):
            _flatten(graph, node, results, flat)
            outcome.matches += 1
    if outcome.matches:
        merge_equal(graph)  # Quantisations of equal reshapes read the same now.
    return outcome


def _results(node: fx.Node) -> dict[int, fx.Node]:
    if not isinstance(node.meta["val"], tuple):
        return {0: node}
    items = [user for user in node.users if user.target is operator.getitem]
    return {place: item for item in items if isinstance(place := item.args[1], int)}


def _is_flat(user: fx.Node, result: fx.Node) -> bool:
    """Return whether a reader makes [T, H] of the result, and a quantisation reads that."""
    value, rows = tensor(user), tensor(result)
    if reshape_source(user) is not result or value is None or rows is None:
        return False
    if value.dim() != 2 or rows.dim() <= 2 or not isinstance(rows.shape[-1], int):
        return False
    if value.shape[-1] != rows.shape[-1]:
        return False
    return any(is_call(reader, QUANTISERS) for reader in user.users)


def _operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands that have rows: not the weight."""
    assert isinstance(node.target, OpOverload)
    tensors = node.args[: PRODUCERS[node.target].num_tensors]
    return [one for one in tensors if isinstance(one, fx.Node) and one.meta["val"].dim() > 1]


def _has_even_rows(node: fx.Node) -> bool:
    """Return whether [..., H] can be viewed as [T, H]. Adds no guard."""
    value = node.meta["val"]
    return isinstance(value.shape[-1], int) and all(
        statically_known_true(value.stride(dim) == value.stride(dim + 1) * value.shape[dim + 1])
        for dim in range(value.dim() - 2)
    )


def _flatten(graph: fx.Graph, node: fx.Node, results: dict[int, fx.Node], flat: fx.Node) -> None:
    """Put the operator on flattened operands in the place of `node`."""
    rows = flat.meta["val"].shape[0]
    assert isinstance(node.target, OpOverload)
    operands = set(_operands(node))
    arguments = [
        _rows_of(node, one, rows) if isinstance(one, fx.Node) and one in operands else one
        for one in node.args
    ]
    value = node.meta["val"]
    values = value if isinstance(value, tuple) else (value,)
    # Views of the values before: what reads a result as a view has their storage, and no other layer has.
    flattened = tuple(one.view((rows, one.shape[-1])) for one in values)
    result = flattened if isinstance(value, tuple) else flattened[0]
    news = insert_call(node, node.target, arguments, result, node)
    for place, old in results.items():
        for user in list(old.users):
            if place == 0 and user is not flat and _is_flat(user, old):
                user.replace_all_uses_with(news[0])
                graph.erase_node(user)
        if place == 0:
            flat.replace_all_uses_with(news[0])
            graph.erase_node(flat)
        if old.users:
            sizes = _sizes(node, old)
            (back,) = insert_call(node, aten.view.default, (news[place], sizes), old.meta["val"], node)
            old.replace_all_uses_with(back)
    erase_dead(graph, *results.values(), *news)


def _rows_of(anchor: fx.Node, node: fx.Node, rows: int | torch.SymInt) -> fx.Node:
    """Return an operand as rows: what it is a reshape of, where that is rows already, or a view of it."""
    width = node.meta["val"].shape[-1]
    # `reshape` may be a copy, which a later write to its source does not reach.
    source = None if is_call(node, aten.reshape.default) else reshape_source(node)
    value = None if source is None else tensor(source)
    if source is not None and value is not None and value.dim() == 2 and value.shape[1] == width:
        return source  # Equal in size and width, it has as many rows.
    shape = (rows, width)
    # Not shared between layers: a view's storage is its operand's.
    (view,) = insert_call(anchor, aten.view.default, (node, [-1, width]), node.meta["val"].view(shape), node)
    return view


def _sizes(anchor: fx.Node, like: fx.Node) -> list[object]:
    """Return the sizes of a result, as numbers or as nodes: those of the operand that has the same rows."""
    source = _operands(anchor)[0]
    sizes: list[object] = []
    for dim, size in enumerate(like.meta["val"].shape):
        if isinstance(size, int):
            sizes.append(size)
        else:
            arguments = (source, dim)
            sizes += insert_call(anchor, torch.ops.aten.sym_size.int, arguments, size, source)
    return sizes


PASS = Pass(name="norm_reshape", run=_run)
