"""The verifier finds what a broken pass leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fuse_cache.passes.verify import IllegalGraphError, promise_of, verify
from tests.passes.graphs import aot_graph

aten = torch.ops.aten


def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    y.add_(1)
    return x.relu() + y, x.sin()


def use_before_definition(graph: Any) -> None:
    first = next(node for node in graph.nodes if node.op == "call_function")
    last = [node for node in graph.nodes if node.op == "call_function"][-1]
    first.append(last)
    last.append(first)
    graph.find_nodes(op="placeholder")[0].append(
        graph.find_nodes(op="call_function", target=aten.copy_.default)[0]
    )


def forget_meta(graph: Any) -> None:
    node = next(iter(graph.nodes))
    with graph.inserting_before(graph.output_node()):
        graph.call_function(aten.cos.default, (node,))


def swap_outputs_for_another_shape(graph: Any) -> None:
    first, second = graph.output_node().args[0]
    with graph.inserting_before(graph.output_node()):
        wrong = graph.call_function(aten.sum.default, (first,))
    wrong.meta["val"] = first.meta["val"].sum()
    graph.output_node().args = ((wrong, second),)


def drop_an_output(graph: Any) -> None:
    graph.output_node().args = (tuple(graph.output_node().args[0][:1]),)


def drop_a_write(graph: Any) -> None:
    (write,) = graph.find_nodes(op="call_function", target=aten.copy_.default)
    graph.erase_node(write)


def write_to_another_input(graph: Any) -> None:
    (write,) = graph.find_nodes(op="call_function", target=aten.copy_.default)
    others = [node for node in graph.find_nodes(op="placeholder") if node is not write.args[0]]
    write.replace_input_with(write.args[0], others[0])


def drop_an_input(graph: Any) -> None:
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.placeholder("surprise").meta["val"] = torch.empty(())


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (use_before_definition, "before it has been defined"),
        (forget_meta, "has no meta"),
        (swap_outputs_for_another_shape, "output 0 was"),
        (drop_an_output, "1 outputs instead of 2"),
        (drop_a_write, "writes to inputs changed"),
        (write_to_another_input, "writes to inputs changed"),
        (drop_an_input, "the inputs changed"),
    ],
)
def test_damage_is_named_together_with_the_pass(damage: Callable[[Any], None], words: str) -> None:
    gm = aot_graph(function, torch.randn(4, 4), torch.randn(4, 4))
    promise = promise_of(gm.graph)
    verify(gm.graph, promise, "nothing")
    damage(gm.graph)
    with pytest.raises(IllegalGraphError, match=words) as raised:
        verify(gm.graph, promise, "clumsy")
    assert raised.value.pass_name == "clumsy"
