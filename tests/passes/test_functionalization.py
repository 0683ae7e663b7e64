"""Functionalisation repair: a copy where the old value is needed, and nowhere else."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fuse_cache.passes import clone_elimination, functionalization, lower_ir, raise_ir
from fuse_cache.passes.base import Pass
from tests.passes.graphs import aot_graph, call, run_pass, targets

LIBRARY = torch.library.Library("fuse_cache_test_functional", "DEF")  # type: ignore[no-untyped-call]  # torch has no types here
LIBRARY.define("add_norm_(Tensor(a!) x, Tensor(b!) residual, Tensor weight) -> ()")  # type: ignore[no-untyped-call]  # as above
LIBRARY.define("store(Tensor(a!) cache, Tensor x) -> Tensor")  # type: ignore[no-untyped-call]  # as above


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    residual.add_(x)
    x.copy_(residual * weight)


def _store(cache: Tensor, x: Tensor) -> Tensor:
    cache.copy_(x * 2)
    return x + 1


LIBRARY.impl("add_norm_", _add_norm, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # as above
LIBRARY.impl("store", _store, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # as above
torch.library.register_fake(
    "fuse_cache_test_functional::store", lambda cache, x: torch.empty_like(x), lib=LIBRARY
)
add_norm_ = torch.ops.fuse_cache_test_functional.add_norm_
store = torch.ops.fuse_cache_test_functional.store


def intermediates(x: Tensor, r: Tensor, w: Tensor) -> Any:
    x, r = x * 1.5, r + 1
    add_norm_(x, r, w)
    return x.relu(), r


def inputs(x: Tensor, r: Tensor, w: Tensor) -> Any:
    add_norm_(x, r, w)
    return x.relu()


def read_before(x: Tensor, r: Tensor, w: Tensor) -> Any:
    x, r = x * 1.5, r + 1
    early = x + 3
    add_norm_(x, r, w)
    return x.relu(), r, early


def input_overwritten_later(x: Tensor, r: Tensor, w: Tensor) -> Any:
    store(x, r)
    store(x, w)
    x.add_(1)
    return x.sum()


def returns_a_result(x: Tensor, r: Tensor, w: Tensor) -> Any:
    out = torch.empty_like(x)
    return store(out, x) + out


def old_value_read_later(x: Tensor, r: Tensor, w: Tensor) -> Any:
    x, r = x * 1.5, r + 1
    y = x.clone()
    add_norm_(y, r, w)
    return y.relu(), r, x + 3


def old_view_read_later(x: Tensor, r: Tensor, w: Tensor) -> Any:
    x = x * 1.5
    row = x[0]
    y = x.clone()
    store(y, r)
    return y.relu(), row + 3


def caller_must_not_see_it(x: Tensor, r: Tensor, w: Tensor) -> Any:
    y = x.clone()
    store(y, r)
    return y + 1


def between_two_writes(x: Tensor, r: Tensor, w: Tensor) -> Any:
    store(x, r)
    row = x[0]
    total = x + row
    store(x, w)
    return total, x.sum()


@pytest.mark.parametrize(
    "function",
    [intermediates, inputs, read_before, input_overwritten_later, returns_a_result, between_two_writes],
)
def test_no_copy_is_made_where_nobody_needs_the_old_value(function: Callable[..., Any]) -> None:
    names = repaired(function)
    assert "aten.clone.default" not in names


@pytest.mark.parametrize("function", [old_value_read_later, old_view_read_later, caller_must_not_see_it])
def test_one_copy_is_made_where_the_old_value_is_needed(function: Callable[..., Any]) -> None:
    names = repaired(function)
    assert names.count("aten.clone.default") == 1


def repaired(function: Callable[..., Any], before: Sequence[Pass] = ()) -> list[str]:
    """Repair the function's graph, after passes that have work there; it must call the operators directly
    and do what the function does."""
    arguments = [torch.rand(4, 8) for _ in range(3)]
    gm = aot_graph(function, *arguments)
    for earlier in before:
        run_pass(earlier, gm)
    outcome = run_pass(functionalization.PASS, gm)
    assert outcome.candidates == outcome.matches > 0
    names = targets(gm)
    assert not any("auto_functionalized" in name for name in names)
    expected_arguments = [argument.clone() for argument in arguments]
    expected = function(*expected_arguments)
    expected = expected if isinstance(expected, tuple) else (expected,)
    used = [argument.clone() for argument in arguments]
    for one, other in zip(call(gm, *used), expected, strict=True):
        torch.testing.assert_close(one, other)
    for one, other in zip(used, expected_arguments, strict=True):
        torch.testing.assert_close(one, other)
    return names


def test_a_write_to_a_view_is_left_to_inductor() -> None:
    def function(x: Tensor, r: Tensor) -> Tensor:
        cache = x * 2
        store(cache[0], r)
        return cache.sum(0)

    arguments = torch.rand(4, 8), torch.rand(8)
    gm = aot_graph(function, *arguments)
    outcome = run_pass(functionalization.PASS, gm)
    assert (outcome.candidates, outcome.matches) == (1, 0)
    torch.testing.assert_close(call(gm, *arguments)[0], function(*arguments))


def _norm(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w[0]


def parts_of_a_norm_read_later(x: Tensor, r: Tensor, w: Tensor) -> Any:
    normed = _norm(x, w)
    one, other = normed.chunk(2, -1)
    y = normed.clone()
    store(y, r)
    return y.relu(), one + other


def another_layer_read_later(x: Tensor, r: Tensor, w: Tensor) -> Any:
    first = _norm(x, w)
    second = _norm(first + r, w)
    store(second, r)
    return second.relu(), first.relu()


@pytest.mark.parametrize(
    ("function", "copies"), [(parts_of_a_norm_read_later, 1), (another_layer_read_later, 0)]
)
def test_behind_lowering_copies_are_made_where_the_old_value_is_needed(
    function: Callable[..., Any], copies: int
) -> None:
    before = raise_ir.PASS, lower_ir.PASS, clone_elimination.PASS
    assert repaired(function, before).count("aten.clone.default") == copies


@pytest.mark.parametrize("place", [0, 1])
def test_several_nodes_that_take_the_same_result_are_one(place: int) -> None:
    # Graph rewrites leave such pairs behind; `store` returns one result, then the cache's new value.
    def function(x: Tensor, r: Tensor) -> Any:
        cache = x * 2
        out = store(cache, r)
        return out + 1, cache + 1, out - 1, cache - 1

    arguments = torch.rand(4, 8), torch.rand(4, 8)
    gm = aot_graph(function, *arguments)
    (one,) = [node for node in gm.graph.nodes if node.target is operator.getitem and node.args[1] == place]
    first, *_, last = list(one.users)
    with gm.graph.inserting_before(last):
        again = gm.graph.call_function(operator.getitem, one.args)
    again.meta.update(one.meta)
    last.replace_input_with(one, again)
    assert (first.args[0], last.args[0]) == (one, again)
    outcome = run_pass(functionalization.PASS, gm)
    assert outcome.matches == 1
    assert "auto_functionalized" not in "".join(targets(gm))
    for found, expected in zip(call(gm, *arguments), function(*arguments), strict=True):
        torch.testing.assert_close(found, expected)
