"""A replacement with several results stands behind its operands and before their readers (case 4)."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor, fx

from fuse_cache.passes.base import Outcome, Pass, Setting
from fuse_cache.passes.rewrite import NoRoom, erase_dead, make_room
from tests.passes.graphs import aot_graph, call, run_pass, targets

aten = torch.ops.aten
LIBRARY = torch.library.Library("fuse_cache_test_rewrite", "DEF")  # type: ignore[no-untyped-call]  # torch has no types here
LIBRARY.define("relu_add(Tensor a, Tensor b) -> (Tensor, Tensor)")  # type: ignore[no-untyped-call]  # as above
LIBRARY.impl("relu_add", lambda a, b: (a.relu(), b + a.relu()), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # as above
RELU_ADD = torch.ops.fuse_cache_test_rewrite.relu_add.default


def fuse_relu_add(graph: fx.Graph, setting: Setting) -> Outcome:
    """The pattern (r = relu(a), b + r) of the bug report: two results, one of them early."""
    outcome = Outcome()
    for relu in graph.find_nodes(op="call_function", target=aten.relu.default):
        for add in [user for user in relu.users if user.target == aten.add.Tensor]:
            other = add.args[0] if add.args[1] is relu else add.args[1]
            outcome.candidates += 1
            anchor = make_room(graph, (relu, add), (relu.args[0], other))
            if isinstance(anchor, NoRoom):
                continue
            with graph.inserting_before(anchor):
                both = graph.call_function(RELU_ADD, (relu.args[0], other))
                both.meta["val"] = (relu.meta["val"], add.meta["val"])
                results = [graph.call_function(operator.getitem, (both, place)) for place in (0, 1)]
            for result, old in zip(results, (relu, add), strict=True):
                result.meta["val"] = old.meta["val"]
                old.replace_all_uses_with(result)
            erase_dead(graph, add)
            outcome.matches += 1
            break
    return outcome


PASS = Pass(name="relu_add", run=fuse_relu_add)


def check(function: Callable[..., Tensor], matches: int, *args: Tensor) -> fx.GraphModule:
    gm = aot_graph(function, *args)
    outcome = run_pass(PASS, gm)  # verifies: nothing is used before it has been defined
    assert (outcome.candidates, outcome.matches) == (1, matches)
    torch.testing.assert_close(call(gm, *args)[0], function(*args))
    return gm


X, Y = torch.randn(4, 4), torch.randn(4, 4)


def test_an_operand_that_is_merely_late_is_moved_up() -> None:
    def late(x: Tensor, y: Tensor) -> Tensor:
        r = x.relu()
        u = r.sqrt()
        m = y * 2
        return u @ (m + r)

    names = targets(check(late, 1, X, Y))
    assert names.index("aten.mul.Tensor") < names.index("fuse_cache_test_rewrite.relu_add.default")
    assert names.index("fuse_cache_test_rewrite.relu_add.default") < names.index("aten.sqrt.default")


def test_an_operand_that_depends_on_a_reader_of_the_result_is_left_alone() -> None:
    def circular(x: Tensor, y: Tensor) -> Tensor:
        r = x.relu()
        u = r.sqrt()
        m = (u.sum() + y) * 2
        return u @ (m + r)

    before = targets(aot_graph(circular, X, Y))
    assert targets(check(circular, 0, X, Y)) == before


def test_an_operand_is_not_moved_over_a_write_that_it_would_miss() -> None:
    def written(x: Tensor, y: Tensor) -> Tensor:
        r = x.relu()
        u = r.sqrt()
        return u @ (y * 2 + r)

    gm = aot_graph(written, X, Y)
    sqrt = next(node for node in gm.graph.nodes if node.target == aten.sqrt.default)
    y = gm.graph.find_nodes(op="placeholder")[1]
    with gm.graph.inserting_after(sqrt):
        write = gm.graph.call_function(aten.add_.Tensor, (y, 1.0))
    write.meta["val"] = y.meta["val"]
    gm.recompile()
    expected = call(gm, X, Y.clone())[0]
    run_pass(PASS, gm)
    torch.testing.assert_close(call(gm, X, Y.clone())[0], expected)


def test_an_operand_that_stands_early_needs_no_move() -> None:
    def early(x: Tensor, y: Tensor) -> Tensor:
        m = y * 2
        r = x.relu()
        return r.sqrt() @ (m + r)

    check(early, 1, X, Y)
