"""No-op elimination: sound under aliasing and mutation, and not shy where it is safe."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fuse_cache.passes import noop
from tests.passes.graphs import aot_graph, call, run_pass, targets

aten = torch.ops.aten


def eager_graph(function: Callable[..., Any], *args: Tensor) -> fx.GraphModule:
    """Trace operators as they are called, in-place ones included: the hardest graph that a pass may meet."""
    with FakeTensorMode() as mode:
        gm = make_fx(function)(*(mode.from_tensor(argument) for argument in args))
    gm.meta["arguments"] = list(range(len(args)))
    return gm


def assert_same_effects(gm: fx.GraphModule, function: Callable[..., Any], *args: Tensor) -> None:
    """The graph must return what the function returns, and leave its inputs as the function leaves them."""
    expected_inputs = [argument.clone() for argument in args]
    expected = function(*expected_inputs)
    inputs = [argument.clone() for argument in args]
    found = call(gm, *inputs)
    expected = expected if isinstance(expected, (tuple, list)) else (expected,)
    for one, other in [*zip(found, expected, strict=True), *zip(inputs, expected_inputs, strict=True)]:
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def reduced(function: Callable[..., Any], *args: Tensor) -> tuple[list[str], int]:
    gm = eager_graph(lambda *a: [function(*a)], *args)
    outcome = run_pass(noop.PASS, gm)
    assert_same_effects(gm, function, *args)
    return targets(gm), outcome.matches


X = torch.arange(12, dtype=torch.float32).reshape(3, 4)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.view(3, 4).relu(),
        lambda x: aten._unsafe_view(x, [3, 4]).relu(),
        lambda x: x.expand(3, 4).relu(),
        lambda x: x.permute(0, 1).relu(),
        lambda x: aten.slice(x, 0, 0, 3).relu(),
        lambda x: aten.alias(x).relu(),
        lambda x: x.clone().relu(),
        lambda x: torch.ops.prims.convert_element_type(x, torch.float32).relu(),
        lambda x: aten.slice_scatter(torch.zeros(3, 4), x, 0, 0, 3).relu(),
        lambda x: aten.copy(torch.zeros(3, 4), x).relu(),
        lambda x: x.view(3, 4).clone().view(3, 4).relu(),
    ],
)
def test_what_does_nothing_goes(function: Callable[[Tensor], Tensor]) -> None:
    names, matches = reduced(function, X)
    assert [name for name in names if "zeros" not in name] == ["aten.relu.default"]
    assert matches >= 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.t().clone(memory_format=torch.contiguous_format).relu(),  # other strides
        lambda x: aten.slice(x, 0, 1, 3).relu(),
        lambda x: x[:, :2].expand(3, 2).add(1),
        lambda x: x[:1].expand(3, 4).relu(),
        lambda x: torch.ops.prims.convert_element_type(x, torch.float64).relu(),
        lambda x: aten.slice_scatter(torch.zeros(3, 4), x[:2], 0, 0, 2).relu(),
        lambda x: x.view(4, 3).relu(),
        lambda x: x[:2].as_strided((2, 4), (4, 1), 4).relu(),  # another offset of the same storage
    ],
)
def test_what_does_something_stays(function: Callable[[Tensor], Tensor]) -> None:
    before = targets(eager_graph(lambda x: [function(x)], X))
    names, _ = reduced(function, X)
    assert len(names) >= len(before) - 1
    assert any(name not in ("aten.relu.default", "aten.add.Tensor") for name in names)


def test_a_view_of_a_view_reads_the_source() -> None:
    gm = eager_graph(lambda x: [x.view(12).view(4, 3).view(2, 6).relu()], X)
    assert run_pass(noop.PASS, gm).matches == 2
    views = gm.graph.find_nodes(op="call_function", target=aten.view.default)
    assert views[-1].args[0].op == "placeholder"


def copy_then_source_is_written(dst: Tensor, src: Tensor) -> Tensor:
    # Case 25 of the bug reports: Inductor's own pass gave [2, 2, 2].
    dst[0:, :] = src[0:, :]
    src.add_(1)
    return dst.sum(0)


def test_a_copy_whose_source_is_written_later_is_kept() -> None:
    dst, src = torch.zeros(2, 3), torch.ones(2, 3)
    gm = aot_graph(copy_then_source_is_written, dst, src)
    run_pass(noop.PASS, gm)
    inputs = dst.clone(), src.clone()
    (total,) = call(gm, *inputs)
    assert total.tolist() == [2.0, 2.0, 2.0]
    assert inputs[0].tolist() == [[1.0] * 3] * 2
    assert inputs[1].tolist() == [[2.0] * 3] * 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.clone(), x.add_(1))[0] + 0,  # the source is written
        lambda x: (x.clone(), x[0].zero_())[0] + 0,  # through a view of it
        lambda x: (x.view(12).clone(), x.t().mul_(2))[0] + 0,  # and copied through another
        lambda x: (c := x.clone(), c.add_(1), x + c)[2],  # the copy is written
        lambda x: (c := x.clone(), c[1].zero_(), x + c)[2],  # through a view
        lambda x: x.clone(),  # the copy is returned
        lambda x: x.clone().view(12),  # or a view of it
    ],
)
def test_a_snapshot_stays_a_snapshot(function: Callable[[Tensor], Tensor]) -> None:
    names, _ = reduced(function, X.clone())
    assert "aten.clone.default" in names


def test_a_copy_that_is_read_before_the_source_was_written_earlier_goes() -> None:
    def written_before(x: Tensor) -> Tensor:
        x.add_(1)
        return x.clone() + 1

    assert "aten.clone.default" not in reduced(written_before, X.clone())[0]


def random_program(seed: int) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """A straight line of views, copies, sums and writes over two inputs, drawn from a seed."""

    def program(a: Tensor, b: Tensor) -> list[Tensor]:
        rng = random.Random(seed)
        values = [a, b]
        for _ in range(rng.randint(3, 9)):
            x, y = rng.choice(values), rng.choice(values)
            steps: list[Callable[[], Tensor]] = [
                lambda x=x: x.view(x.shape),  # type: ignore[misc]  # bound now, not later
                lambda x=x: x.view(-1),  # type: ignore[misc]
                lambda x=x: x.clone(),  # type: ignore[misc]
                lambda x=x: aten.slice(x, 0, 0, x.shape[0]),  # type: ignore[misc]
                lambda x=x: torch.ops.prims.convert_element_type(x, torch.float32),  # type: ignore[misc]
                lambda x=x: x + 1,  # type: ignore[misc]
                lambda x=x: x.add_(1),  # type: ignore[misc]
                lambda x=x, y=y: x.view(-1).copy_(y.reshape(-1)),  # type: ignore[misc]
                lambda x=x, y=y: aten.copy(x.view(-1), y.reshape(-1)),  # type: ignore[misc]
                lambda x=x: x[1:],  # type: ignore[misc]
            ]
            made = rng.choice(steps)()
            values.append(made if made.numel() == 8 else x + made.sum())
        chosen = rng.sample(values[2:], k=min(2, len(values) - 2))
        return [value + 0 if rng.random() < 0.7 else value for value in chosen]

    return program


def test_no_random_program_changes_its_results_or_its_writes() -> None:
    removed = 0
    for seed in range(120):
        program = random_program(seed)
        arguments = torch.rand(2, 4), torch.rand(2, 4)
        gm = eager_graph(program, *arguments)
        removed += run_pass(noop.PASS, gm).matches
        assert_same_effects(gm, program, *arguments)
    assert removed > 40  # The programs do hold what can go.


def test_symbolic_sizes_are_compared_without_a_guard() -> None:
    def function(x: Tensor) -> Tensor:
        return x.view(x.shape[0], 4).clone().relu().view(-1, 4).add(1)

    gm = aot_graph(function, X, dynamic_rows=True)
    shape_env = next(iter(gm.graph.nodes)).meta["val"].node.shape_env
    before = len(shape_env.guards)
    run_pass(noop.PASS, gm)
    assert len(shape_env.guards) == before
    assert targets(gm) == ["aten.relu.default", "aten.add.Tensor"]
    for count in (1, 5):
        x = torch.rand(count, 4)
        torch.testing.assert_close(call(gm, x)[0], function(x))
