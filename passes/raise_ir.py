"""Raises what models spell out to IR nodes, whose attributes say where the graph rounds.

Runs in the joint graph, before any pass of Inductor's could delete a rounding. An IR node means exactly what
it replaced; what is not fused is spelled out again by `lower_ir`.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload

from fuse_cache.passes import raise_norm, raise_quant
from fuse_cache.passes.base import NearMiss, Outcome, Pass, Reason, Setting
from fuse_cache.passes.raise_norm import Miss, Norm
from fuse_cache.passes.raise_quant import Quant
from fuse_cache.passes.reading import FLOAT8, FLOATS, cast_source, dtype, layout_key
from fuse_cache.passes.rewrite import replace_result
from fuse_cache.passes.verify import same_layout

_NAME = "raise_ir"


def _run(graph: fx.Graph, setting: Setting) -> Outcome:
    outcome = Outcome()
    known: dict[object, torch.Tensor] = {}
    # Norms first: the end of a norm is decided by what reads it, a quantisation does not change that.
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.rsqrt.default):
        _raise(graph, node, raise_norm.recognise(node), outcome, known)
    for node in list(graph.nodes):
        source = cast_source(node)
        if source is not None and dtype(node) in FLOAT8 and dtype(source) in FLOATS:
            _raise(graph, node, raise_quant.recognise(node), outcome, known)
    return outcome


def _raise(
    graph: fx.Graph,
    node: fx.Node,
    found: Norm | Quant | Miss | None,
    outcome: Outcome,
    known: dict[object, torch.Tensor],
) -> None:
    if found is None:
        return
    outcome.candidates += 1
    if isinstance(found, Miss):
        outcome.near_misses.append(NearMiss(_NAME, found.reason, node.name, found.detail))
        return
    operator = raise_norm.OPERATOR if isinstance(found, Norm) else raise_quant.OPERATOR
    if (detail := _difference(operator, found, known)) is not None:
        outcome.near_misses.append(NearMiss(_NAME, Reason.GUARD, node.name, detail))
        return
    replace_result(graph, found.last, operator, found.arguments(), {})
    outcome.matches += 1


def _difference(operator: OpOverload, found: Norm | Quant, known: dict[object, torch.Tensor]) -> str | None:
    """Say how the operator's result would differ in layout from what it is to replace.

    `known` holds the results of earlier sites: the layers of one model share them.
    """
    values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in found.arguments()]
    key = (operator, *(layout_key(value) if isinstance(value, torch.Tensor) else value for value in values))
    if key not in known:
        with enable_python_dispatcher():
            known[key] = operator(*values)
    value, before = known[key], found.last.meta["val"]
    if same_layout(value, before):
        return None
    shown = [f"{one.dtype} {list(one.shape)} {list(one.stride())}" for one in (value, before)]
    return f"the operator gives {shown[0]}, the graph {shown[1]}"


PASS = Pass(name=_NAME, run=_run)
