"""What every pass must leave behind: a legal graph with the same inputs, outputs, mutations, for all sizes.

A pass that asks whether a symbolic size is larger than a number gets an answer for the size that the graph
was traced with, and a guard; a graph that was changed by that answer is wrong for other sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true

from fuse_cache.passes.aliasing import Aliasing, writes
from fuse_cache.passes.base import PassError


class IllegalGraphError(PassError):
    """A pass broke the graph."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What a graph promised before the passes ran."""

    inputs: tuple[fx.Node, ...]
    outputs: tuple[
        object, ...
    ]  # The value that each output had: a fake tensor, a symbolic integer or a constant.
    mutated: frozenset[fx.Node]  # Inputs whose storage is written.
    without_value: frozenset[fx.Node]  # Nodes that had no meta["val"] to begin with.
    shape_env: ShapeEnv | None  # Of the symbolic sizes; None where all sizes are numbers.
    num_guards: int  # What is assumed of them.


def promise_of(graph: fx.Graph) -> Promise:
    """Note what the graph takes, returns and writes."""
    nodes = list(graph.nodes)
    shape_env = next((env for node in nodes if (env := _shape_env(node.meta.get("val"))) is not None), None)
    return Promise(
        inputs=tuple(node for node in nodes if node.op == "placeholder"),
        outputs=tuple(_value(argument) for argument in _output_arguments(graph)),
        mutated=_mutated_inputs(graph),
        without_value=frozenset(node for node in nodes if "val" not in node.meta),
        shape_env=shape_env,
        num_guards=0 if shape_env is None else len(shape_env.guards),
    )


def verify(graph: fx.Graph, promise: Promise, pass_name: str) -> None:
    """Check that the graph is legal and keeps its promise.

    Raises:
        IllegalGraphError: it does not.
    """
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        for argument in node.all_input_nodes:
            if argument not in seen:
                raise IllegalGraphError(
                    pass_name, f"{node.name} uses {argument.name} before it has been defined"
                )
        seen.add(node)
        if node.op == "call_function" and "val" not in node.meta and node not in promise.without_value:
            raise IllegalGraphError(pass_name, f"{node.name} has no meta")
    try:
        graph.lint()
    except RuntimeError as error:
        raise IllegalGraphError(pass_name, str(error)) from error
    if tuple(node for node in graph.nodes if node.op == "placeholder") != promise.inputs:
        raise IllegalGraphError(pass_name, "the inputs changed")
    outputs = [_value(argument) for argument in _output_arguments(graph)]
    if len(outputs) != len(promise.outputs):
        raise IllegalGraphError(pass_name, f"{len(outputs)} outputs instead of {len(promise.outputs)}")
    for place, (now, before) in enumerate(zip(outputs, promise.outputs, strict=True)):
        if not _same_value(now, before):
            raise IllegalGraphError(pass_name, f"output {place} was {before} and is {now}")
    if (mutated := _mutated_inputs(graph)) != promise.mutated:
        names = sorted(node.name for node in mutated ^ promise.mutated)
        raise IllegalGraphError(pass_name, f"writes to inputs changed: {', '.join(names)}")
    if (assumed := _assumed(promise)) is not None:
        raise IllegalGraphError(
            pass_name,
            f"it assumed {assumed} of a symbolic size. Ask with statically_known_true, which assumes nothing",
        )


def _assumed(promise: Promise) -> str | None:
    """Return what was assumed of a symbolic size that had not been assumed before."""
    if promise.shape_env is None or len(promise.shape_env.guards) <= promise.num_guards:
        return None
    shown = [str(guard.expr) for guard in promise.shape_env.guards]
    before, since = set(shown[: promise.num_guards]), shown[promise.num_guards :]
    return next((one for one in since if one not in before), None)


def same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether dtype, device, sizes and strides are known to be equal. Adds no guard."""
    if one.dtype != other.dtype or one.device != other.device or one.dim() != other.dim():
        return False
    pairs = [*zip(one.shape, other.shape, strict=True), *zip(one.stride(), other.stride(), strict=True)]
    return all(_same_size(a, b) for a, b in pairs)


def _same_size(one: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    """Return whether two sizes are known to be equal. To prove it is slow where they are written alike."""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    if isinstance(one, torch.SymInt) and isinstance(other, torch.SymInt) and one.node.expr == other.node.expr:
        return True
    return statically_known_true(one == other)


def _shape_env(value: object) -> ShapeEnv | None:
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    symbolic = next((size for size in sizes if isinstance(size, torch.SymInt)), None)
    return None if symbolic is None else symbolic.node.shape_env


def _output_arguments(graph: fx.Graph) -> tuple[object, ...]:
    (returned,) = graph.output_node().args
    return tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)


def _value(argument: object) -> object:
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def _same_value(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return same_layout(one, other)
    if isinstance(one, (torch.SymInt, int)) and isinstance(other, (torch.SymInt, int)):
        return bool(statically_known_true(one == other))
    return type(one) is type(other) and (one is other or one == other)


def _mutated_inputs(graph: fx.Graph) -> frozenset[fx.Node]:
    if not any(writes(node) for node in graph.nodes):
        return frozenset()
    aliasing = Aliasing(graph)
    return frozenset(node for node in graph.nodes if node.op == "placeholder" and aliasing.is_written(node))
