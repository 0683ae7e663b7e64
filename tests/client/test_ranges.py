"""Which sizes a graph is compiled for, from what the user wrote and what Dynamo traced."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from fuse_cache.client.errors import OptionError
from fuse_cache.client.graph import Encoded
from fuse_cache.client.options import CompileOptions
from fuse_cache.client.ranges import DEFAULT_MAX_TOKENS, plan_ranges, range_symbol_of
from fuse_cache.proto.expression import Op, combine, symbol
from fuse_cache.proto.request import Range
from tests.captured import encode_call
from tests.fakes import resolved_config
from tests.models import capture


@functools.cache
def _graph(*dims: tuple[int, int], upper: int | None = None) -> Encoded:
    """Trace a function of two tensors, `query` [3, 8] and `key` [5, 8], with these (input, dimension)
    marked."""

    def add(query: Tensor, key: Tensor) -> Tensor:
        return query.sum() + key.sum()

    tensors = (torch.randn(3, 8), torch.randn(5, 8))
    for index, dim in dims:
        bounds = {} if upper is None else {"min": 1, "max": upper}
        torch._dynamo.mark_dynamic(tensors[index], dim, **bounds)
    return encode_call(add, *tensors).encoded


def _plan(encoded: Encoded, **options: Any) -> Any:
    return plan_ranges(encoded, CompileOptions.from_mapping(options), resolved_config())


def test_a_graph_without_symbolic_sizes_has_the_one_static_range() -> None:
    plan = _plan(_graph(), compile_ranges=[[1, 4], [5, 8]])
    assert (plan.ranges, plan.source) == ((Range(),), None)


def test_the_only_symbolic_size_needs_no_name_and_the_default_is_one_range() -> None:
    plan = _plan(_graph((1, 0)))
    assert plan.ranges == (Range(symbol=0, lower=1, upper=DEFAULT_MAX_TOKENS),)
    assert _plan(_graph((1, 0)), max_num_batched_tokens=64).ranges[0].upper == 64
    assert _plan(_graph((1, 0), upper=32)).ranges[0].upper == 32


def test_ranges_are_cut_by_what_was_traced_and_those_outside_are_left_out() -> None:
    plan = _plan(_graph((1, 0), upper=32), compile_ranges=[[1, 16], [17, 64], [65, 128]])
    assert [(item.lower, item.upper) for item in plan.ranges] == [(1, 16), (17, 32)]
    assert plan.describe() == "[1, 16], [17, 32]"


@pytest.mark.parametrize("name", ["key:0", "1:0"])
def test_the_size_is_named_by_its_inputs_name_or_number(name: str) -> None:
    encoded = _graph((0, 0), (1, 0))
    plan = _plan(encoded, range_dim=name, compile_ranges=[[2, 9]])
    assert plan.ranges == (Range(symbol=1, lower=2, upper=9),)
    assert plan.source in encoded.symbol_sources[1]


def test_several_sizes_without_ranges_are_all_free_and_with_ranges_must_be_told_apart() -> None:
    encoded = _graph((0, 0), (1, 0))
    assert _plan(encoded).ranges == (Range(),)
    with pytest.raises(OptionError, match=r"range_dim must name .*query:0, key:0"):
        _plan(encoded, compile_ranges=[[1, 8]])
    with pytest.raises(OptionError, match=r"range_dim=value:0 names no .*query:0, key:0"):
        _plan(encoded, range_dim="value:0")


@pytest.mark.parametrize("name", ["value:0", "7:0", "key:9"])
def test_a_wrong_name_is_an_error_though_there_is_only_one_symbolic_size(name: str) -> None:
    with pytest.raises(OptionError, match=rf"range_dim={name} names no .*use one of key:0$"):
        _plan(_graph((1, 0)), range_dim=name, compile_ranges=[[1, 8]])


def test_a_wrong_name_is_an_error_in_a_graph_that_is_cut_in_pieces_too() -> None:
    key = torch.randn(5, 8)
    torch._dynamo.mark_dynamic(key, 0)
    found = []

    def check(gm: GraphModule, inputs: object) -> None:  # Names are known while Dynamo waits.
        for name in ("key:0", "kye:0"):
            try:
                found.append(str(range_symbol_of(gm, CompileOptions.from_mapping({"range_dim": name}))))
            except OptionError as error:
                found.append(str(error))

    capture(lambda key: key.sum(), key, backend_check=check)
    assert found[0].startswith("s")
    assert found[1].startswith("option range_dim=kye:0 names no ")
    assert found[1].endswith("use one of key:0")


def test_a_named_size_that_is_a_constant_in_this_graph_leaves_the_others_free() -> None:
    encoded = _graph((0, 0))
    plan = _plan(encoded, range_dim="key:0", compile_ranges=[[1, 4]])
    assert (plan.ranges, plan.source) == ((Range(),), None)


def test_a_size_that_the_program_was_traced_without_is_left_out_at_the_ends() -> None:
    def not_one(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] != 1 else x

    tensor = torch.randn(3, 8)
    torch._dynamo.mark_dynamic(tensor, 0)
    encoded = encode_call(not_one, tensor).encoded
    assert encoded.graph.guards, "Dynamo left no guard: the test proves nothing"
    plan = _plan(encoded, compile_ranges=[[1, 4], [5, 8]])
    assert [(item.lower, item.upper) for item in plan.ranges] == [(2, 4), (5, 8)]


def test_a_range_of_which_the_program_admits_neither_end_is_not_asked_for() -> None:
    encoded = _graph((0, 0))
    beyond = combine(Op.GT, (symbol(0), 16))
    graph = replace(encoded.graph, guards=(beyond,))
    plan = _plan(replace(encoded, graph=graph), compile_ranges=[[1, 14], [15, 20], [21, 64]])
    # The second ends where the program goes on: what is left of it is the compiler's to judge.
    assert plan.ranges == (Range(symbol=0, lower=15, upper=20), Range(symbol=0, lower=21, upper=64))
