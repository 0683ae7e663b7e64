"""Clean-up removes what nobody reads, and nothing that has an effect."""

from __future__ import annotations

import torch
from torch import Tensor

from fuse_cache.passes import cleanup
from tests.passes.graphs import aot_graph, call, run_pass, targets

aten = torch.ops.aten


def test_a_chain_that_nobody_reads_goes_and_a_write_stays() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        y.add_(1)
        return x.relu()

    x, y = torch.randn(4), torch.randn(4)
    gm = aot_graph(function, x, y)
    with gm.graph.inserting_before(gm.graph.output_node()):
        node = gm.graph.find_nodes(op="placeholder")[0]
        for _ in range(3):
            value = node.meta["val"]
            node = gm.graph.call_function(aten.cos.default, (node,))
            node.meta["val"] = value
    before = targets(gm)
    assert run_pass(cleanup.PASS, gm).matches == 3
    assert sorted(targets(gm)) == sorted(name for name in before if name != "aten.cos.default")
    mutated = y.clone()
    call(gm, x, mutated)
    torch.testing.assert_close(mutated, y + 1)


def test_drawing_a_random_number_stays() -> None:
    gm = aot_graph(lambda x: x + 1, torch.randn(4))
    with gm.graph.inserting_before(gm.graph.output_node()):
        node = gm.graph.find_nodes(op="placeholder")[0]
        drawn = gm.graph.call_function(aten.rand_like.default, (node,))
        drawn.meta["val"] = node.meta["val"]
    assert run_pass(cleanup.PASS, gm).matches == 0
