"""Clone elimination: a copy that nobody can tell from its source goes; what is written or returned stays."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fuse_cache.passes import clone_elimination, lower_ir, noop, norm_quant, norm_reshape, raise_ir
from fuse_cache.passes.base import Pass
from tests.passes.graphs import aot_graph, run_pass, same_results, targets
from tests.passes.spellings import divide_wide, llama, weights
from tests.passes.spellings_dynamic import group_column
from tests.passes.tracing import run, trace

aten = torch.ops.aten
Program = Callable[..., Any]


def as_called(program: Program, *args: Tensor) -> fx.GraphModule:
    """Trace operators as they are called, in-place ones included: the hardest graph that a pass may meet."""
    with FakeTensorMode() as mode:
        return make_fx(lambda *a: _listed(program(*a)))(*(mode.from_tensor(argument) for argument in args))


def _listed(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _shared(values: list[Tensor]) -> list[tuple[int, int]]:
    """Return the pairs of tensors that share memory."""
    owners = [value.untyped_storage().data_ptr() for value in values]
    return [(i, j) for i in range(len(owners)) for j in range(i) if owners[i] == owners[j]]


def check(one: Pass, program: Program, *args: Tensor) -> tuple[list[str], int]:
    """Results, inputs afterwards and which of them share memory must be as the program leaves them."""
    gm = as_called(program, *args)
    matches = run_pass(one, gm).matches
    expected_inputs, inputs = ([argument.clone() for argument in args] for _ in range(2))
    expected = _listed(program(*expected_inputs))
    with torch.no_grad():
        found = list(gm(*inputs))
    for mine, eager in zip([*found, *inputs], [*expected, *expected_inputs], strict=True):
        assert same_results(mine, eager)
    assert _shared([*found, *inputs]) == _shared([*expected, *expected_inputs])
    return targets(gm), matches


X = torch.arange(12, dtype=torch.float32).reshape(3, 4)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.clone().relu(),
        lambda x: x.t().clone(memory_format=torch.preserve_format).relu(),
        lambda x: x.relu().clone(),  # returned, of memory that is the graph's own
        lambda x: (x.clone() + 1, x.add_(1))[0],  # written when the copy is no longer read
        lambda x: aten.copy(torch.zeros(3, 4), x).relu(),
        lambda x: x.clone().clone().relu(),
        lambda x: aten.clone(x[1:]).relu(),  # of a part
    ],
)
def test_a_copy_that_nobody_can_tell_from_its_source_goes(program: Program) -> None:
    names, matches = check(clone_elimination.PASS, program, X)
    assert not {"aten.clone.default", "aten.copy.default"} & set(names)
    assert matches >= 1


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.clone(),  # a result may be no input
        lambda x: x.clone().view(12),
        lambda x: (y := x.relu(), y.clone()),  # two results are two tensors
        lambda x: (c := x.clone(), x.add_(1), c + 0)[2],  # the source is written meanwhile
        lambda x: (c := x.clone(), x.t().zero_(), c.sum(0))[2],
        lambda x: (c := x.clone(), x.copy_(c.flip(0)), c * 2)[2],
        lambda x: (c := x.clone(), x.add_(c))[1] + 0,  # by its last reader
        lambda x: (c := x.clone(), c.add_(1), x + c)[2],  # the copy is written
        lambda x: (c := x.view(12).clone(), c[3:].zero_(), x.sum() + c)[2],
        lambda x: x[1:].clone().as_strided((2, 2), (4, 1), 0).relu(),  # counts from the start of the storage
        lambda x: x.relu()[1:].clone(),  # a view as a result would keep all of it
        lambda x: x.t().clone(memory_format=torch.contiguous_format).relu(),  # another layout
    ],
)
def test_a_copy_that_someone_could_tell_stays(program: Program) -> None:
    names, _ = check(clone_elimination.PASS, program, X)
    assert "aten.clone.default" in names


def test_two_returned_copies_of_one_tensor_stay_two() -> None:
    def twice(x: Tensor) -> list[Tensor]:
        y = x.relu()
        return [y.clone(), y.clone()]

    names, matches = check(clone_elimination.PASS, twice, X)
    assert (names.count("aten.clone.default"), matches) == (1, 1)


LIBRARY = torch.library.Library("fuse_cache_test_clones", "DEF")  # type: ignore[no-untyped-call]  # torch has no types here
LIBRARY.define("aligned(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]  # as above
LIBRARY.impl("aligned", lambda x: x * 2, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # as above


def test_a_kernel_of_another_library_keeps_the_alignment_that_it_was_given() -> None:
    aligned = torch.ops.fuse_cache_test_clones.aligned
    names, _ = check(clone_elimination.PASS, lambda x: aligned(x[1:].clone()), X)
    assert "aten.clone.default" in names
    names, _ = check(clone_elimination.PASS, lambda x: aligned(x.clone()), X)
    assert "aten.clone.default" not in names


STEPS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, y: x.clone(),
    lambda x, y: x.clone(),
    lambda x, y: x.contiguous(),
    lambda x, y: aten.copy(x, y),
    lambda x, y: torch.ops.prims.convert_element_type(x, torch.float32),
    lambda x, y: x.view(2, 4),
    lambda x, y: aten.slice(x, 0, 0, 2),
    lambda x, y: x.flip(0),
    lambda x, y: x + y,
    lambda x, y: x.relu(),
    lambda x, y: x.add_(1),
    lambda x, y: x.copy_(y),
    lambda x, y: x.mul_(y),
    lambda x, y: x[1:].zero_().expand(2, 4) + y,
    lambda x, y: aten.slice_scatter(x, y, 0, 0, 2),
)
PLANS = st.lists(
    st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 11), st.integers(0, 11)), min_size=3, max_size=12
)


def _program(plan: Iterable[tuple[int, int, int]], returned: Iterable[int]) -> Program:
    def program(a: Tensor, b: Tensor) -> list[Tensor]:
        values = [a, b]
        for step, x, y in plan:
            values.append(STEPS[step](values[x % len(values)], values[y % len(values)]))
        return [values[place % len(values)] for place in returned]

    return program


@pytest.mark.parametrize("one", [clone_elimination.PASS, noop.PASS], ids=lambda one: str(one.name))
@settings(max_examples=80, deadline=None, derandomize=True)
@given(plan=PLANS, returned=st.lists(st.integers(0, 13), min_size=1, max_size=3, unique=True))
def test_no_program_of_copies_views_and_writes_changes(
    one: Pass, plan: list[tuple[int, int, int]], returned: list[int]
) -> None:
    check(one, _program(plan, returned), *_pair())


def _pair() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, generator=generator) for _ in range(2)]


def test_the_programs_hold_what_can_go() -> None:
    rng = random.Random(0)
    removed = 0
    for _ in range(30):
        plan = [(rng.randrange(len(STEPS)), rng.randrange(12), rng.randrange(12)) for _ in range(9)]
        removed += check(clone_elimination.PASS, _program(plan, [8, 10]), *_pair())[1]
    assert removed > 10


def written_after_a_snapshot(dst: Tensor, src: Tensor) -> Tensor:
    dst[0:, :] = src[0:, :]
    src.add_(1)
    return dst.sum(0)


def cache_is_written(keys: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    # Attention reads the cache as it was, and the step's keys as they came.
    before = keys.clone()
    new = k.view(1, 2, 3, 4).clone()
    keys.index_copy_(2, positions, new)
    k.add_(1)
    return before.sum(2), new * 2


@pytest.mark.parametrize(
    "passes", [(noop.PASS,), (clone_elimination.PASS,), (noop.PASS, clone_elimination.PASS)]
)
def test_a_snapshot_before_a_write_is_what_it_was_case_25(passes: tuple[Pass, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(1, 2, 8, 4, generator=generator), torch.randn(2, 3, 4, generator=generator)
    programs: tuple[tuple[Program, tuple[Tensor, ...]], ...] = (
        (written_after_a_snapshot, (torch.zeros(2, 3), torch.ones(2, 3))),
        (cache_is_written, (*cache, torch.tensor([1, 4, 5]))),
    )
    for program, args in programs:
        for one in passes:
            check(one, program, *args)
        gm = aot_graph(program, *args)  # As Inductor gets it: the writes stand last.
        for one in passes:
            run_pass(one, gm)
        expected_inputs, inputs = ([argument.clone() for argument in args] for _ in range(2))
        expected = _listed(program(*expected_inputs))
        found = list(gm(*(inputs[place] for place in gm.meta["arguments"])))
        for mine, eager in zip([*found, *inputs], [*expected, *expected_inputs], strict=True):
            assert same_results(mine, eager)


def test_symbolic_sizes_are_compared_without_a_guard() -> None:
    def function(x: Tensor) -> Tensor:
        return x.clone().relu().view(-1, 4).clone() + 1

    gm = trace(function, X, dynamic_rows=True)
    assert run_pass(clone_elimination.PASS, gm).matches == 2  # The verifier counts the guards.
    assert "aten.clone.default" not in targets(gm)
    assert same_results(run(gm, X[:2])[0], function(X[:2]))


def test_fused_graphs_keep_the_copies_that_give_scales_their_layout() -> None:
    def block(x: Tensor, w: Tensor, s: Tensor) -> Any:
        normed = llama(x, w)
        return divide_wide(normed, s), *group_column(normed)

    x = torch.randn(5, 256).to(torch.bfloat16)
    arguments = x, weights(256, torch.bfloat16), torch.tensor(0.1)
    gm = trace(block, *arguments)
    for one in (raise_ir.PASS, norm_reshape.PASS, norm_quant.PASS, lower_ir.PASS, clone_elimination.PASS):
        run_pass(one, gm)
    for mine, eager in zip(run(gm, *arguments), block(*arguments), strict=True):
        assert same_results(mine, eager)
