"""Writes a reference out in the graph: traced once per set of attributes and layouts, then copied in."""

from __future__ import annotations

import operator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import lowerings, make_fallback
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

from fuse_cache.kernels.library import Reference
from fuse_cache.passes.implementations import Implementation
from fuse_cache.passes.reading import layout_key
from fuse_cache.passes.verify import same_layout

aten = torch.ops.aten
EXACT = frozenset(
    {
        aten.mean.dim,
        aten.silu.default,
        aten.gelu.default,
        aten.sigmoid.default,
        aten.log2.default,
        aten.exp2.default,
    }
)


class Inliner:
    """Replaces calls by what their reference does.

    Layers of one model share a trace: it depends on the operator, its attributes and the layouts of its
    operands, so that the cost of a further site is that of copying some ten nodes.
    """

    def __init__(self) -> None:
        self._decompositions: dict[bool, dict[OpOverload, Any]] = {}
        self._traced: dict[object, fx.GraphModule] = {}

    def inline(self, graph: fx.Graph, node: fx.Node, chosen: Implementation) -> None:
        """Write out `node`, whose arguments are all positional.

        Where it is to be exact Inductor generates no code for what `EXACT` lists: PyTorch's own kernel then
        does what it does eagerly. A generated loop adds in another order and has other exponentials, which
        moves a last bit now and then, and so a code.
        """
        operands = [argument for argument in node.args if isinstance(argument, fx.Node)]
        exact = chosen.exact
        traced = self._trace(node, operands, chosen)
        before = _results_by_place(node)
        values: dict[fx.Node, fx.Node] = dict(
            zip(traced.graph.find_nodes(op="placeholder"), operands, strict=True)
        )
        returned: Any = None
        with graph.inserting_before(node):
            for inner in traced.graph.nodes:
                if inner.op == "output":
                    returned = inner.args[0]
                elif inner.op != "placeholder":
                    copied = graph.node_copy(inner, values.__getitem__)
                    copied.meta = {"val": inner.meta["val"]}
                    if "stack_trace" in node.meta:
                        copied.meta["stack_trace"] = node.meta["stack_trace"]
                    if exact and inner.target in EXACT:
                        _keep_whole(inner.target)
                        copied.meta["should_fallback"] = True
                    values[inner] = copied
        results = returned if isinstance(returned, (tuple, list)) else (returned,)
        for old, place in before:
            new = values[results[place]]
            # The trace's own value is that of another layer's result too, and what reads this one as a view
            # has the storage of the old value.
            if results[place].op != "placeholder" and same_layout(new.meta["val"], old.meta["val"]):
                new.meta["val"] = old.meta["val"]
            old.replace_all_uses_with(new)
            if old is not node:
                graph.erase_node(old)
        graph.erase_node(node)

    def _trace(self, node: fx.Node, operands: list[fx.Node], chosen: Implementation) -> fx.GraphModule:
        attributes = tuple(None if isinstance(argument, fx.Node) else argument for argument in node.args)
        key = (
            node.target,
            chosen.name,
            attributes,
            tuple(layout_key(operand.meta["val"]) for operand in operands),
        )
        if key not in self._traced:
            # Each a tensor of its own: nodes may share one fake value, which the trace could not tell apart,
            # and of the next site's operands two may differ where these are the same node.
            values = [operand.meta["val"].detach() for operand in operands]
            # The mode itself for what is made from nothing, of symbolic sizes.
            with detect_fake_mode(values) or nullcontext(), enable_python_dispatcher():
                trace = make_fx(partial(_call, chosen.function, node.args), self._table(chosen.exact))
                self._traced[key] = trace(*values)
        return self._traced[key]

    def _table(self, exact: bool) -> dict[OpOverload, Any]:
        """Return Inductor's decompositions, without those of `EXACT` where they are to stay whole."""
        if exact not in self._decompositions:
            table = select_decomp_table()
            self._decompositions[exact] = {
                key: value for key, value in table.items() if not (exact and key in EXACT)
            }
        return self._decompositions[exact]


def _results_by_place(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """Return the nodes that hold the results of a call, each with its place among them."""
    if not isinstance(node.meta["val"], (tuple, list)):
        return [(node, 0)]
    found: list[tuple[fx.Node, int]] = []
    for item in node.users:
        assert item.target is operator.getitem
        assert isinstance(item.args[1], int)
        found.append((item, item.args[1]))
    return found


def _keep_whole(target: OpOverload) -> None:
    """See to it that Inductor can call PyTorch's kernel of this operator.

    SiLU and GELU have a decomposition and so no lowering: it refuses a graph that still holds them. The entry
    is for such graphs alone, as any other was decomposed before.
    """
    if target not in lowerings:
        make_fallback(target, warn=False, override_decomp=True)  # type: ignore[no-untyped-call]  # torch has no types here


def _call(reference: Reference, arguments: tuple[object, ...], *operands: torch.Tensor) -> object:
    """Call the reference with its operands in the places that nodes have in `arguments`."""
    remaining = iter(operands)
    return reference(
        *(next(remaining) if isinstance(argument, fx.Node) else argument for argument in arguments)
    )


def is_ours(node: fx.Node, namespace: str) -> bool:
    """Return whether the node calls an operator of this namespace."""
    return isinstance(node.target, OpOverload) and node.target.namespace == namespace
