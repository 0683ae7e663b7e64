"""What `range_dim` means in the graphs of a function that Dynamo breaks in several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import GraphModule

from fuse_cache.client.frames import is_users_own_function
from fuse_cache.client.graph import encode_graph
from fuse_cache.client.options import CompileOptions
from fuse_cache.client.ranges import RangePlan, plan_ranges, range_symbol_of
from fuse_cache.client.warn import warn_once
from fuse_cache.proto.request import Range
from tests.fakes import resolved_config

FIRST, SECOND = (1, 4), (5, 8)


def _plans(function: Callable[..., Any], *tensors: Tensor, **compiling: Any) -> list[tuple[bool, RangePlan]]:
    """Compile `function` for two ranges of `tokens:0`, all sizes symbolic. The graphs run as they are.

    Returns, for each graph, whether it was taken for the user's own function, and the plan.
    """
    range_dim = compiling.pop("range_dim", "tokens:0")
    options = CompileOptions.from_mapping({"compile_ranges": [FIRST, SECOND], "range_dim": range_dim})
    found = []

    def backend(gm: GraphModule, inputs: object) -> Callable[..., Any]:
        is_own = is_users_own_function()
        encoded = encode_graph(gm)
        found.append((is_own, plan_ranges(encoded, options, resolved_config(), is_own=is_own)))
        if encoded.symbols and not is_own and "tokens" not in encoded.input_names:
            assert range_symbol_of(gm, options, is_own=False) is None
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, dynamic=True, **compiling)(*tensors)
    return found


def _bounds(plan: RangePlan) -> list[tuple[int | None, int | None]]:
    return [(item.lower, item.upper) for item in plan.ranges]


def _halves(x: Tensor) -> Tensor:
    y = x * 2
    torch._dynamo.graph_break()
    return y + y.shape[0]


class _Model(torch.nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return _halves(tokens.sin()) * 3


def test_later_graphs_of_a_broken_function_take_their_only_symbol_for_the_named_one() -> None:
    def broken(tokens: Tensor) -> Tensor:
        hidden = tokens.sin()
        torch._dynamo.graph_break()
        return hidden.cos() * hidden.shape[0]

    own, later = _plans(broken, torch.randn(3))
    assert (own[0], later[0]) == (True, False)
    assert _bounds(own[1])[1] == _bounds(later[1])[1] == SECOND
    assert later[1].source is not None


@pytest.mark.parametrize("compiled", [_Model(), _Model().forward])
def test_functions_that_a_broken_one_calls_are_later_graphs_too(compiled: Any) -> None:
    found = _plans(compiled, torch.randn(3))
    assert [is_own for is_own, _ in found] == [True] + [False] * (len(found) - 1)
    assert len(found) >= 3
    assert {_bounds(plan)[-1] for _, plan in found if plan.source} == {SECOND}


def test_with_several_symbols_a_later_graph_finds_the_name_or_leaves_all_sizes_free(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(other: Tensor, tokens: Tensor) -> Tensor:
        mixed = tokens.sum() + other
        torch._dynamo.graph_break()
        kept = tokens + 1
        summed = mixed.sum()
        torch._dynamo.graph_break()
        again = kept.cos() * kept.shape[0]
        return again.sum() + mixed.sin().sum() * mixed.shape[0] + summed

    warn_once.cache_clear()
    own, named, lost = _plans(broken, torch.randn(5), torch.randn(3))
    assert [is_own for is_own, _ in (own, named, lost)] == [True, False, False]
    assert _bounds(named[1])[-1] == SECOND
    assert lost[1].ranges == (Range(),)
    (warning,) = [text for record in caplog.records if "range_dim" in (text := record.getMessage())]
    assert "range_dim tokens:0 names nothing in a later graph" in warning
    assert "2 symbolic sizes" in warning
    # A number means an input of the user's function; the later graphs have others in its place.
    by_number = _plans(broken, torch.randn(5), torch.randn(3), range_dim="1:0")
    assert [len(plan.ranges) for _, plan in by_number] == [2, 1, 1]


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_wrong_name_is_an_error_for_the_users_own_function_and_lists_the_sizes(fullgraph: bool) -> None:
    with pytest.raises(BackendCompilerFailed, match=r"range_dim=tokesn:0 names no .*use one of tokens:0"):
        _plans(
            lambda tokens: tokens.sin() if fullgraph else _halves(tokens.sin()),
            torch.randn(3),
            range_dim="tokesn:0",
            fullgraph=fullgraph,
        )


def test_without_a_break_the_whole_function_is_one_graph_of_the_users() -> None:
    ((is_own, plan),) = _plans(lambda tokens: tokens.sin(), torch.randn(3), fullgraph=True)
    assert is_own
    assert _bounds(plan)[-1] == SECOND


def test_a_graph_that_no_tracer_hands_over_is_the_callers_own() -> None:
    assert is_users_own_function()
