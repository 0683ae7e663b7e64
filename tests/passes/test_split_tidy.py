"""Split tidy: parts of one projection become one split, in real models too; what is no partition stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.fx.experimental._config as fx_config
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.decomposition import select_decomp_table

from fuse_cache.passes import act_quant, noop, raise_ir, split_tidy
from tests.models import build_model, example_inputs
from tests.passes.graphs import run_pass, same_results, targets
from tests.passes.spellings_dynamic import per_token
from tests.passes.tracing import run, trace

aten = torch.ops.aten
SPLIT, SLICE = "aten.split_with_sizes.default", "aten.slice.Tensor"


def splits(gm: fx.GraphModule) -> list[tuple[list[int], int, int]]:
    """Return sizes, dimension and the number of parts that are read of each split, in order."""
    nodes = gm.graph.find_nodes(op="call_function", target=aten.split_with_sizes.default)
    return [(list(node.args[1]), node.args[2], len(node.users)) for node in nodes]


def tidied(function: Callable[..., Any], dynamic: bool) -> fx.GraphModule:
    """Tidy a function of x [T, 12] and compare it with eager."""
    gm = trace(function, torch.randn(5, 12), dynamic_rows=dynamic)
    run_pass(noop.PASS, gm)
    run_pass(split_tidy.PASS, gm)  # The verifier sees to it that no size is assumed.
    for count in (5, 2) if dynamic else (5,):
        x = torch.randn(count, 12)
        expected = function(x)
        expected = expected if isinstance(expected, tuple) else (expected,)
        for one, other in zip(run(gm, x), expected, strict=True):
            assert same_results(one, other)
    return gm


def by_slices(x: Tensor) -> Any:
    return x[..., :6].relu(), x[..., 6:9].sin(), x[..., 9:].cos()


def behind_each_other(x: Tensor) -> Any:
    return x[:, 8:].relu(), x[:, :8].sin(), x[:, 8:12].cos()


def with_a_gap(x: Tensor) -> Any:
    return x[:, :4].relu(), x[:, -2:].sin()


def by_chunk(x: Tensor) -> Any:
    one, other, _ = x.chunk(3, -1)
    return one.relu(), other.sin()


def by_split(x: Tensor) -> Any:
    one, other, last = x.split([6, 3, 3], dim=1)  # type: ignore[no-untyped-call]  # torch has no types here
    return one.relu(), other.sin(), last.cos()


def a_split_of_a_split(x: Tensor) -> Any:
    q, both = torch.split(x, [6, 6], -1)
    k, v = both.chunk(2, -1)
    return q.relu(), k.sin(), v.cos()


def three_deep(x: Tensor) -> Any:
    one, rest = torch.split(x, [2, 10], -1)
    two, rest = torch.split(rest, [4, 6], -1)
    three, four = torch.split(rest, [5, 1], -1)
    return one.relu(), two.sin(), three.cos(), four.exp()


def slices_of_a_slice(x: Tensor) -> Any:
    both = x[:, 6:]
    return x[:, :6].relu(), both[:, :3].sin(), both[:, 3:].cos()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (by_slices, [([6, 3, 3], 1, 3)]),
        (behind_each_other, [([8, 4], 1, 2)]),
        (with_a_gap, [([4, 6, 2], 1, 2)]),
        (by_chunk, [([4, 4, 4], 1, 2)]),
        (by_split, [([6, 3, 3], 1, 3)]),
        (a_split_of_a_split, [([6, 3, 3], 1, 3)]),
        (three_deep, [([2, 4, 5, 1], 1, 4)]),
        (slices_of_a_slice, [([6, 3, 3], 1, 3)]),
    ],
)
def test_parts_of_one_projection_become_one_split(
    function: Callable[..., Any], expected: list[tuple[list[int], int, int]], dynamic: bool
) -> None:
    gm = tidied(function, dynamic)
    assert splits(gm) == expected
    assert not {SLICE, "aten.split.Tensor"} & set(targets(gm))
    before = str(gm.graph)
    assert run_pass(split_tidy.PASS, gm).matches == 0  # It is tidy now.
    assert str(gm.graph) == before


def overlapping(x: Tensor) -> Any:
    return x[:, :8].relu(), x[:, 4:].sin()


def one_part_only(x: Tensor) -> Any:
    return x[:, :8].relu()


def every_other(x: Tensor) -> Any:
    return x[:, ::2].relu(), x[:, 1::2].sin()


def along_two_dimensions(x: Tensor) -> Any:
    return x[:2].relu(), x[:, 6:].sin()


def parts_of_two_tensors(x: Tensor) -> Any:
    return x[:, :6].relu(), x.exp()[:, 6:].sin()


def part_is_returned(x: Tensor) -> Any:
    return x[:, :6], x[:, 6:].sin()


def rows_of_a_symbolic_number(x: Tensor) -> Any:
    half = x.shape[0] // 2
    return x[:half].relu(), x[half:].sin()


@pytest.mark.parametrize(
    ("function", "dynamic"),
    [
        (overlapping, True),
        (one_part_only, True),
        (every_other, True),
        (along_two_dimensions, False),
        (parts_of_two_tensors, True),
        (part_is_returned, True),
        (rows_of_a_symbolic_number, True),
    ],
)
def test_what_is_no_partition_by_numbers_stays(function: Callable[..., Any], dynamic: bool) -> None:
    gm = tidied(function, dynamic)
    assert SLICE in targets(gm)
    assert splits(gm) == []


def test_a_part_that_is_read_as_a_whole_too_is_split_where_it_is() -> None:
    def function(x: Tensor) -> Any:
        q, both = torch.split(x, [6, 6], -1)
        k, v = torch.split(both, [3, 3], -1)
        return q.relu(), k.sin(), v.cos(), both.exp()

    assert splits(tidied(function, True)) == [([6, 6], 1, 2), ([3, 3], 1, 2)]


def test_a_gate_from_slices_is_fused_before_and_after() -> None:
    def function(x: Tensor) -> Any:
        return per_token(torch.nn.functional.silu(x[:, :6]) * x[:, 6:])

    fusing = raise_ir.PASS, act_quant.PASS
    for passes in ((noop.PASS, *fusing), (noop.PASS, split_tidy.PASS, *fusing)):
        gm = trace(function, torch.randn(5, 12), dynamic_rows=True)
        assert [run_pass(one, gm).matches for one in passes][-1] == 1
        assert not {SLICE, SPLIT} & set(targets(gm))


def _model_graph(name: str) -> tuple[fx.GraphModule, list[Any]]:
    """Return a model's joint graph with symbolic batch and length, and what it was called with."""
    graphs: list[fx.GraphModule] = []
    calls: list[list[Any]] = []

    def compile_graph(gm: fx.GraphModule, inputs: Sequence[object]) -> object:
        graphs.append(gm)

        def called(*args: Any) -> Any:
            calls.append(list(args))
            return gm.forward(*args)

        return make_boxed_func(called)

    backend = aot_autograd(fw_compiler=compile_graph, decompositions=select_decomp_table())
    model = build_model(name, torch.bfloat16)
    torch._dynamo.reset()
    with torch.no_grad(), fx_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]  # added at run time
        torch.compile(model, backend=backend, fullgraph=True)(**example_inputs(model, "dynamic"))
    return graphs[0], calls[0]


# By model: the sizes of q, k and v (Phi-3 takes them of one projection), of gate and up, of rotated halves.
PARTS = {
    "phi3": {(64, 32, 32): 2, (128, 128): 2, (8, 8): 4},
    "qwen3": {(8, 8): 4},
    "gpt2": {(64, 64, 64): 2},
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", PARTS)
def test_the_projections_of_a_real_model_are_split_once_each(name: str) -> None:
    gm, arguments = _model_graph(name)
    with torch.no_grad(), fx_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]  # added at run time
        expected = gm(*arguments)
        run_pass(noop.PASS, gm)
        run_pass(split_tidy.PASS, gm)
        found = gm(*arguments)
    sizes = [tuple(one) for one, _, _ in splits(gm)]
    assert {one: sizes.count(one) for one in sizes} == PARTS[name]
    for one, other in zip(found, expected, strict=True):
        assert not isinstance(one, Tensor) or same_results(one, other)
