"""The recorder: what a pass changed, each kind of change once, and as little around it as tells the story."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, fx

from fuse_cache.passes.act_quant import PASS as ACT_QUANT
from fuse_cache.passes.cleanup import PASS as CLEANUP
from fuse_cache.passes.record import NEIGHBOURS, SITE_CHANGES, SITES, Change, Mark, Recorder
from tests.passes.graphs import CPU

aten = torch.ops.aten


def chain(length: int) -> fx.Graph:
    """Return a graph of additions, each of which a relu reads that nobody reads: `cleanup` removes those."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.zeros(2, 3)
    for number in range(length):
        for target in (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor):
            node = graph.call_function(target, (node, number))
            node.meta["val"] = torch.zeros(2, 3)
        graph.call_function(aten.relu.default, (node,)).meta["val"] = torch.zeros(2, 3)
    graph.output((node,))
    return graph


def recorded(graph: fx.Graph) -> Change:
    recorder = Recorder()
    recorder.graph(graph, "cleanup", "before")
    CLEANUP.run(graph, CPU)
    recorder.graph(graph, "cleanup", "after")
    (change,) = recorder.changes
    return change


def test_a_removed_node_is_drawn_before_with_what_it_read_and_is_gone_after() -> None:
    change = recorded(chain(1))
    assert (change.pass_name, change.nodes_before, change.nodes_after) == ("cleanup", 6, 5)
    (site,) = change.sites
    assert [(node.name, node.mark) for node in site.before] == [
        ("sub_tensor", Mark.KEPT),
        ("relu_default", Mark.REMOVED),
    ]
    removed = site.before[1]
    assert removed.call == "aten.relu.default(sub_tensor)"
    assert removed.value == "float32[2, 3]"
    assert removed.inputs == (0,)
    assert site.after == ()


def test_a_change_that_every_layer_has_is_kept_once_with_its_number() -> None:
    change = recorded(chain(400))
    (site,) = change.sites
    assert change.nodes_before > 1000
    assert site.times == 400
    assert len(site.before) == 2
    assert site.also_at[0] == "relu_default_1"
    assert change.sites_left_out == 0


def test_what_is_kept_of_a_graph_that_changes_everywhere_is_bounded() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    targets = [aten.relu.default, aten.abs.default, aten.neg.default, aten.exp.default, aten.sin.default]
    chance = random.Random(0)
    for _ in range(4000):  # Nobody reads any; in an order that does not repeat.
        graph.call_function(chance.choice(targets), (x,))
    graph.output((x,))
    change = recorded(graph)
    assert len(change.sites) == SITES
    assert change.sites_left_out > 0
    assert all(len(site.before) <= SITE_CHANGES + NEIGHBOURS for site in change.sites)


def test_a_replacement_is_seen_from_both_sides_and_its_reader_is_rewired() -> None:
    graph = chain(1)
    recorder = Recorder()
    recorder.graph(graph, "p", "before")
    old = next(node for node in graph.nodes if node.target is aten.mul.Tensor)
    with graph.inserting_before(old):
        new = graph.call_function(aten.div.Tensor, old.args)
        new.meta["val"] = old.meta["val"]
    old.replace_all_uses_with(new)
    graph.erase_node(old)
    recorder.graph(graph, "p", "after")
    (site,) = recorder.changes[0].sites
    marks = [{node.name: node.mark for node in side} for side in (site.before, site.after)]
    assert marks[0]["mul_tensor"] is Mark.REMOVED
    assert marks[1]["div_tensor"] is Mark.ADDED
    assert [side["sub_tensor"] for side in marks] == [Mark.REWIRED] * 2
    assert [side["add_tensor"] for side in marks] == [Mark.KEPT] * 2
    # As they were: what the replaced node read has been erased from it since.
    assert next(node for node in site.before if node.name == "mul_tensor").inputs != ()


def test_symbolic_sizes_are_shown_and_no_guard_is_added() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv())
    context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC]
    )
    value: Tensor = mode.from_tensor(torch.zeros(5, 3), symbolic_context=context)
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(aten.relu.default, (x,))
    x.meta["val"] = node.meta["val"] = value
    graph.output((x,))
    (site,) = recorded(graph).sites
    assert site.before[1].value.startswith("float32[s")
    assert mode.shape_env is not None
    assert mode.shape_env.guards == []


def test_patterns_are_kept_as_the_python_they_are_written_in() -> None:
    recorder = Recorder()
    recorder.patterns_of(ACT_QUANT)
    recorder.patterns_of(CLEANUP)
    assert set(recorder.patterns) == {"act_quant"}
    assert "F.silu(gate) * up" in recorder.patterns["act_quant"]
