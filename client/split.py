"""Cuts a graph into pieces at given operators, each of which is compiled under its own key.

The splitting operators get pieces of their own, which run as they are (attention that no compiler should
see). What is left between them are the pieces to compile; layers of one model often have the same one.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.fx.passes.split_module import split_module

from fuse_cache.client.errors import OptionError
from fuse_cache.kernels.fx_targets import UnknownTarget, resolve
from fuse_cache.proto import targets


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece. `name` is its submodule in the stitching graph; `is_splitting` ones are not compiled."""

    name: str
    gm: GraphModule
    is_splitting: bool


@dataclass(frozen=True, slots=True)
class Split:
    """A graph in pieces. Each returns a tuple; put its compiled form in place of `stitch`'s submodule."""

    stitch: GraphModule
    pieces: tuple[Piece, ...]


def split_graph(gm: GraphModule, splitting_ops: Sequence[str]) -> Split:
    """Cut `gm` at every call of one of `splitting_ops`, names as `resolve_splitting_op` takes them.

    `gm` itself is left as it is. Without such a call there is one piece.

    Raises:
        OptionError: a name is none of a function, method or operator.
    """
    methods = {name for name in splitting_ops if name in targets.METHODS and "." not in name}
    functions = [found for name in splitting_ops for found in resolve_splitting_op(name)]
    parts: dict[FxNode, int] = {}
    splitting: set[int] = set()
    current = 0
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        if _is_item_of_part(node, parts, splitting):
            parts[node] = parts[node.args[0]]
        elif _is_splitting(node, functions, methods):
            current += 1
            parts[node] = current
            splitting.add(current)
            current += 1
        else:
            parts[node] = current
    stitch = split_module(gm, gm, lambda node: parts[node], keep_original_order=True)
    numbers = {f"submod_{number}": number for number in set(parts.values())}
    pieces = []
    for node in stitch.graph.nodes:
        if node.op == "call_module":
            name = str(node.target)
            piece = stitch.get_submodule(name)
            assert isinstance(piece, GraphModule)
            _return_tuple(stitch, node, piece)
            pieces.append(Piece(name, piece, numbers[name] in splitting))
    stitch.recompile()
    return Split(stitch, tuple(pieces))


def resolve_splitting_op(name: str) -> tuple[Callable[..., Any], ...]:
    """Return the callables that `name` means.

    It is a function ("torch.nn.functional.scaled_dot_product_attention"), an operator with all its overloads
    ("vllm::unified_attention"), one overload ("aten::bmm.default"), or a tensor method ("softmax"), which has
    no callable.

    Raises:
        OptionError: it means nothing here.
    """
    if name in targets.METHODS:
        return ()
    # torch keeps some functions in an inner module; people know them by the outer name.
    names = [name, name.replace("torch.nn.functional.", "torch._C._nn."), name.replace("nn.functional.", "")]
    if "::" in name and "." not in name:
        schemas = torch._C._jit_get_schemas_for_operator(name)
        names = [f"{name}.{schema.overload_name or 'default'}" for schema in schemas]
    found: list[Callable[..., Any]] = []
    for candidate in names:
        with contextlib.suppress(UnknownTarget):
            found.append(resolve(candidate))
    if not found:
        raise OptionError(
            f"splitting_ops: {name!r} is no function, method or operator here. Name one as the graph calls "
            "it, e.g. torch.nn.functional.scaled_dot_product_attention or mylib::attention, and import its "
            "library first"
        )
    packets = [op.overloadpacket for op in found if isinstance(op, torch._ops.OpOverload)]
    return (*found, *packets)


def _is_splitting(node: FxNode, functions: Sequence[Callable[..., Any]], methods: set[str]) -> bool:
    if node.op == "call_method":
        return str(node.target) in methods
    return any(node.target is function for function in functions)


def _is_item_of_part(node: FxNode, parts: dict[FxNode, int], splitting: set[int]) -> bool:
    """Say whether `node` takes one of several results of a splitting operator: it goes with it."""
    if node.target is not operator.getitem or not isinstance(node.args[0], FxNode):
        return False
    value = node.args[0].meta.get("example_value", node.args[0].meta.get("val"))
    return parts.get(node.args[0], -1) in splitting and isinstance(value, tuple | list)


def _return_tuple(stitch: GraphModule, call: FxNode, piece: GraphModule) -> None:
    """Make a piece that returns one value return a tuple of one, as compilers want."""
    output = next(node for node in reversed(piece.graph.nodes) if node.op == "output")
    returned = output.args[0]
    if isinstance(returned, tuple | list):
        return
    output.args = ((returned,),)
    piece.recompile()
    with stitch.graph.inserting_after(call):
        item = stitch.graph.call_function(operator.getitem, (call, 0))
    call.replace_all_uses_with(item, delete_user_cb=lambda user: user is not item)
