"""Graphs as Inductor's hooks see them, made without compiling anything."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.decomposition import select_decomp_table

from fuse_cache.passes.base import Outcome, Pass, Setting
from fuse_cache.passes.verify import promise_of, verify

CPU = Setting("cpu-avx2")


def aot_graph(function: Callable[..., Any], *args: Tensor, dynamic_rows: bool = False) -> fx.GraphModule:
    """Return what AOTAutograd makes of a function for inference, with the writes to inputs kept in the graph.

    `dynamic_rows` makes the first size of the first argument symbolic. Dynamo orders inputs by first use:
    `call` undoes that.
    """
    found: list[fx.GraphModule] = []
    order: list[str] = []

    def capture(gm: fx.GraphModule, inputs: Sequence[object]) -> object:
        found.append(gm)
        return make_boxed_func(gm.forward)

    desugar = aot_autograd(
        fw_compiler=capture, decompositions=select_decomp_table(), keep_inference_input_mutations=True
    )

    def backend(gm: fx.GraphModule, inputs: Sequence[object]) -> object:
        order.extend(str(node.target) for node in gm.graph.find_nodes(op="placeholder"))
        return desugar(gm, inputs)

    torch._dynamo.reset()
    copies = [argument.clone() for argument in args]
    if dynamic_rows:
        torch._dynamo.mark_dynamic(copies[0], 0)
    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True)(*copies)
    (gm,) = found
    names = [f"L_{name}_" for name in inspect.signature(function).parameters]
    gm.meta["arguments"] = [names.index(name) if name in names else None for name in order]
    return gm


def run_pass(one: Pass, gm: fx.GraphModule, setting: Setting = CPU) -> Outcome:
    """Run a pass as the manager does: the graph must be legal afterwards, and keep its promise."""
    promise = promise_of(gm.graph)
    outcome = one.run(gm.graph, setting)
    verify(gm.graph, promise, one.name)
    gm.recompile()
    return outcome


def call(gm: fx.GraphModule, *args: Tensor) -> list[Any]:
    """Run a graph eagerly on real tensors; a symbolic size is that of the first tensor's first dimension."""
    given = [args[0].shape[0] if place is None else args[place] for place in gm.meta["arguments"]]
    with torch.no_grad():
        return list(gm(*given))


def targets(gm: fx.GraphModule) -> list[str]:
    """Return the names of what the graph calls, in order."""
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors hold the same bytes, NaN included."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def same_results(one: Tensor, other: Tensor, *, signed_zeros: bool = True) -> bool:
    """Return whether two tensors have the same sizes, strides (where they matter) and values, bit by bit.

    A NaN equals any NaN, as in `same_codes`; a zero equals any zero unless they are `signed_zeros`.
    """
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    strides = zip(one.shape, one.stride(), other.stride(), strict=True)
    if one.numel() and any(size > 1 and a != b for size, a, b in strides):
        return False
    first, second = one.reshape(-1), other.reshape(-1)
    if not one.is_floating_point():
        return torch.equal(first, second)
    bits = [value.contiguous().view(torch.uint8).view(len(value), -1) for value in (first, second)]
    wide = first.float(), second.float()
    excused = wide[0].isnan() & wide[1].isnan()
    if not signed_zeros:
        excused |= (wide[0] == 0) & (wide[1] == 0)
    return bool(((bits[0] == bits[1]).all(-1) | excused).all())


def same_codes(one: Tensor, other: Tensor) -> bool:
    """Return whether two FP8 tensors hold the same codes.

    A NaN equals any NaN: IEEE 754 leaves its sign open, and PyTorch's own loops differ in it.
    """
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    equal = one.view(torch.uint8) == other.view(torch.uint8)
    return bool((equal | (one.float().isnan() & other.float().isnan())).all())
