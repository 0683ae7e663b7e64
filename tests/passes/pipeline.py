"""The passes of one CPU compilation on a traced graph, and what their result must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from fuse_cache.passes import act_quant, cleanup, lower_ir, noop, norm_quant, norm_reshape, raise_ir
from fuse_cache.passes.base import Outcome, Pass
from tests.passes.graphs import run_pass, same_results
from tests.passes.spellings import rows, weights
from tests.passes.tracing import run, trace

Function: TypeAlias = Callable[..., Any]
FUSIONS = (norm_quant.PASS, act_quant.PASS)
PASSES: tuple[Pass, ...] = (raise_ir.PASS, noop.PASS, norm_reshape.PASS, *FUSIONS, cleanup.PASS)


def given(count: int = 6, width: int = 128) -> tuple[Tensor, ...]:
    """Return x and y [count, width], a weight and a scale."""
    x, y = (rows(count, width, torch.bfloat16, seed=seed) for seed in (count, count + 100))
    return x, y, weights(width, torch.bfloat16), torch.tensor(0.0371)


def fuse(
    function: Function, *args: Tensor, dynamic: bool = False
) -> tuple[fx.GraphModule, dict[str, Outcome]]:
    """Trace a function and run the passes up to the fusions."""
    gm = trace(function, *args, dynamic_rows=dynamic)
    return gm, fuse_graph(gm)


def fuse_graph(gm: fx.GraphModule) -> dict[str, Outcome]:
    """Run the passes up to the fusions; each is verified."""
    return {one.name: run_pass(one, gm) for one in PASSES}


def fused(found: dict[str, Outcome]) -> int:
    """Return how many fusions there were."""
    return sum(found[one.name].matches for one in FUSIONS)


def assert_as_eager(gm: fx.GraphModule, function: Function, *args: Tensor) -> list[Tensor]:
    """The graph must compute what the function does, with fused operators and again spelled out."""
    expected = function(*args)
    expected = expected if isinstance(expected, (tuple, list)) else (expected,)
    found: list[Tensor] = []
    for lowered in (False, True):
        if lowered:
            run_pass(lower_ir.PASS, gm)
        found = run(gm, *args)
        for one, other in zip(found, expected, strict=True):
            assert same_results(one, other)
    return found
