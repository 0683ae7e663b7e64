"""Raises what models spell out to IR nodes, whose attributes say where the graph rounds.

Runs in the joint graph, before any pass of Inductor's could delete a rounding. An IR node means exactly what
it replaced; what is not fused is spelled out again by `lower_ir`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fuse_cache.kernels.rms_norm.op import RMS_NORM
from fuse_cache.passes import (
    raise_add_norm,
    raise_gate,
    raise_layout,
    raise_norm,
    raise_nvfp4,
    raise_quant,
    raise_vllm,
    raise_vllm_ir,
)
from fuse_cache.passes.base import NearMiss, Outcome, Pass, Reason, Setting
from fuse_cache.passes.merge import merge_equal
from fuse_cache.passes.raised import Found, Miss
from fuse_cache.passes.reading import layout_key, tensor
from fuse_cache.passes.rewrite import NoRoom, can_be_viewed, erase_dead, insert_call, make_room, take_over
from fuse_cache.passes.verify import same_layout

_NAME = "raise_ir"


@dataclass(frozen=True, slots=True)
class _Family:
    """Where one kind of operator may be, and what reads it there.

    A family that `refines` works on nodes that were raised already: they are no candidates of their own.
    """

    candidates: Callable[[fx.Graph], Iterable[fx.Node]]
    recognise: Callable[[fx.Node], Found | Miss | None]
    refines: bool = False


def _calls(*targets: OpOverload) -> Callable[[fx.Graph], Iterable[fx.Node]]:
    def find(graph: fx.Graph) -> Iterator[fx.Node]:
        for target in targets:
            yield from graph.find_nodes(op="call_function", target=target)

    return find


# Norms and activations first: a quantisation that reads them does not change where they end.
_FAMILIES = (
    _Family(raise_vllm.candidates, raise_vllm.recognise),
    _Family(raise_vllm_ir.candidates, raise_vllm_ir.recognise),
    _Family(_calls(*raise_norm.ANCHORS), raise_norm.recognise),
    _Family(_calls(RMS_NORM), raise_add_norm.recognise, refines=True),
    _Family(_calls(*raise_gate.ANCHORS), raise_gate.recognise),
    _Family(raise_nvfp4.candidates, raise_nvfp4.recognise),
    _Family(raise_quant.candidates, raise_quant.recognise),
    _Family(raise_layout.candidates, raise_layout.recognise, refines=True),
)


def _run(graph: fx.Graph, setting: Setting) -> Outcome:
    outcome = Outcome()
    known: dict[object, object] = {}
    for family in _FAMILIES:
        for node in list(family.candidates(graph)):
            found = None if node._erased else family.recognise(node)
            if found is not None:
                _raise(graph, node, found, outcome, known, refines=family.refines)
    merge_equal(graph)
    return outcome


def _raise(
    graph: fx.Graph,
    node: fx.Node,
    found: Found | Miss,
    outcome: Outcome,
    known: dict[object, object],
    *,
    refines: bool,
) -> None:
    outcome.candidates += not refines
    miss = found if isinstance(found, Miss) else _replace(graph, found, known)
    if miss is None:
        outcome.matches += not refines
    elif not refines:
        outcome.near_misses.append(NearMiss(_NAME, miss.reason, node.name, miss.detail))


def _replace(graph: fx.Graph, found: Found, known: dict[object, object]) -> Miss | None:
    """Put the operator in the place of what it means; say why if it cannot be."""
    value = _fake_result(found, known)
    values = value if isinstance(value, tuple) else (value,)
    olds = [(old, new) for old, new in zip(found.results, values, strict=True) if old is not None]
    for old, new in olds:
        if (detail := _difference(new, old.meta["val"])) is not None:
            return Miss(Reason.GUARD, detail)
    operands = [argument for argument in found.arguments if isinstance(argument, fx.Node)]
    anchor = make_room(graph, [old for old, _ in olds], operands)
    if isinstance(anchor, NoRoom):
        return Miss(Reason.GUARD, f"it cannot stand in one place: {anchor.value}")
    own = tuple(_own_value(old, new) for old, new in zip(found.results, values, strict=True))
    results = insert_call(
        anchor, found.operator, found.arguments, own if isinstance(value, tuple) else own[0], olds[0][0]
    )
    for replaced, result in zip(found.results, results, strict=True):
        if replaced is not None and not replaced._erased:
            take_over(replaced, result)
            erase_dead(graph, replaced)
    erase_dead(graph, *results)
    return None


def _own_value(old: fx.Node | None, value: torch.Tensor) -> torch.Tensor:
    """Return a fake value like `value`, which the layers of a model share, with storage of its own.

    What reads a replaced value as a view has its storage, which is then that of the new one too, unless a
    cast comes in between.
    """
    before = None if old is None else tensor(old)
    if before is not None and same_layout(before, value):
        return before
    if before is not None and before.dtype == value.dtype:
        # Not a view, which would ask for sizes of 1.
        return before.as_strided(value.shape, value.stride())
    with detect_fake_mode(value) or nullcontext(), enable_python_dispatcher():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _fake_result(found: Found, known: dict[object, object]) -> object:
    """Run the operator on fake tensors. `known` holds earlier results: the layers of one model share them."""
    values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in found.arguments]
    parts = (layout_key(value) if isinstance(value, torch.Tensor) else value for value in values)
    key = (found.operator, *parts)
    if key not in known:
        with enable_python_dispatcher():
            known[key] = found.operator(*values)
    return known[key]


def _difference(value: torch.Tensor, before: torch.Tensor) -> str | None:
    """Say how the operator's result differs from what it is to replace by more than a reshape and a cast."""
    if same_layout(value, before):
        return None
    is_reshape = value.is_contiguous() and before.is_contiguous() and can_be_viewed(before)
    has_as_many = statically_known_true(value.numel() == before.numel())
    if is_reshape and has_as_many and value.device == before.device:
        return None
    shown = [f"{one.dtype} {list(one.shape)} {list(one.stride())}" for one in (value, before)]
    return f"the operator gives {shown[0]}, the graph {shown[1]}"


PASS = Pass(name=_NAME, run=_run)
