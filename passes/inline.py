"""Writes a reference out in the graph: traced once per set of attributes and layouts, then copied in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.decomposition import select_decomp_table
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

from fuse_cache.passes.reading import layout_key

Reference = Callable[..., torch.Tensor]


class Inliner:
    """Replaces calls by what their reference does.

    Layers of one model share a trace: it depends on the operator, its attributes and the layouts of its
    operands, so that the cost of a further site is that of copying some ten nodes.
    """

    def __init__(self) -> None:
        self._traced: dict[object, fx.GraphModule] = {}

    def inline(self, graph: fx.Graph, node: fx.Node, reference: Reference, *, exact_reductions: bool) -> None:
        """Write out `node`, whose arguments are all positional.

        `exact_reductions` keeps Inductor from generating code for the means: PyTorch's own kernel then adds
        in the order in which it does eagerly. A generated loop adds in another order, which moves the last
        bit of a mean, and so one code in a million.
        """
        operands = [argument for argument in node.args if isinstance(argument, fx.Node)]
        traced = self._trace(node, operands, reference)
        values: dict[fx.Node, fx.Node] = dict(
            zip(traced.graph.find_nodes(op="placeholder"), operands, strict=True)
        )
        result: fx.Node | None = None
        with graph.inserting_before(node):
            for inner in traced.graph.nodes:
                if inner.op == "output":
                    result = values[inner.args[0]]
                elif inner.op != "placeholder":
                    copied = graph.node_copy(inner, values.__getitem__)
                    copied.meta = {"val": inner.meta["val"]}
                    if "stack_trace" in node.meta:
                        copied.meta["stack_trace"] = node.meta["stack_trace"]
                    if exact_reductions and inner.target is torch.ops.aten.mean.dim:
                        copied.meta["should_fallback"] = True
                    values[inner] = copied
        assert result is not None
        node.replace_all_uses_with(result)
        graph.erase_node(node)

    def _trace(self, node: fx.Node, operands: list[fx.Node], reference: Reference) -> fx.GraphModule:
        attributes = tuple(None if isinstance(argument, fx.Node) else argument for argument in node.args)
        key = (node.target, attributes, tuple(layout_key(operand.meta["val"]) for operand in operands))
        if key not in self._traced:
            with enable_python_dispatcher():
                trace = make_fx(partial(_call, reference, node.args), select_decomp_table())
                self._traced[key] = trace(*(operand.meta["val"] for operand in operands))
        return self._traced[key]


def _call(reference: Reference, arguments: tuple[object, ...], *operands: torch.Tensor) -> torch.Tensor:
    """Call the reference with its operands in the places that nodes have in `arguments`."""
    remaining = iter(operands)
    return reference(
        *(next(remaining) if isinstance(argument, fx.Node) else argument for argument in arguments)
    )


def is_ours(node: fx.Node, namespace: str) -> bool:
    """Return whether the node calls an operator of this namespace."""
    return isinstance(node.target, OpOverload) and node.target.namespace == namespace
