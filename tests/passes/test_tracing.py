"""The short way to a joint graph gives the graph that Dynamo and AOTAutograd give to Inductor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from tests.passes.spellings import rows, weights
from tests.passes.test_spellings import BLOCKS, HIDDEN
from tests.passes.tracing import trace


def _by_aot(block: Any, *args: Tensor) -> fx.GraphModule:
    """Return what Inductor's joint hook would get."""
    seen: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, example_inputs: Any) -> Any:
        seen.append(gm)
        return gm.forward

    torch._dynamo.reset()
    backend: Any = aot_autograd(fw_compiler=keep, decompositions=select_decomp_table())
    compiled: Any = torch.compile(block, backend=backend, fullgraph=True)
    with torch.no_grad():
        compiled(*args)
    (gm,) = seen
    return gm


def _calls(gm: fx.GraphModule) -> list[tuple[str, str, tuple[int, ...]]]:
    return [
        (str(node.target), str(node.meta["val"].dtype), tuple(node.meta["val"].shape))
        for node in gm.graph.nodes
        if node.op == "call_function" and isinstance(node.meta.get("val"), Tensor)
    ]


# One in six: Dynamo takes a second for each.
@pytest.mark.parametrize("name", list(BLOCKS)[::6])
def test_the_short_way_gives_the_same_graph(name: str) -> None:
    _, block = BLOCKS[name]
    bf16 = torch.bfloat16
    args = (rows(7, HIDDEN, bf16), rows(7, HIDDEN, bf16, 1), weights(HIDDEN, bf16), torch.tensor(0.02))
    assert sorted(_calls(trace(block, *args))) == sorted(_calls(_by_aot(block, *args)))
