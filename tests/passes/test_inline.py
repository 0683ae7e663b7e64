"""Sites that share a trace compute what they would alone, whichever operands they have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuse_cache.passes import act_quant, lower_ir, noop, norm_quant, norm_reshape, raise_ir
from fuse_cache.passes.aliasing import Aliasing
from tests.passes.graphs import run_pass, same_results
from tests.passes.spellings import llama, rows, weights
from tests.passes.spellings_dynamic import per_token
from tests.passes.tracing import run, trace

HIDDEN = 64
PASSES = (raise_ir.PASS, noop.PASS, norm_reshape.PASS, norm_quant.PASS, act_quant.PASS, lower_ir.PASS)


def a_norm_of_two_norms(x: Tensor, y: Tensor, w: Tensor) -> Any:
    return llama(llama(x, w) + llama(y, w), w)


def a_tensor_added_to_itself_first(x: Tensor, y: Tensor, w: Tensor) -> Any:
    return llama(x + x, w), llama(x + y, w)


def a_tensor_added_to_itself_last(x: Tensor, y: Tensor, w: Tensor) -> Any:
    return llama(x + y, w), llama(x + x, w)


def a_tensor_gated_by_itself_first(x: Tensor, y: Tensor, w: Tensor) -> Any:
    return F.silu(x) * x, F.silu(x) * y, F.silu(y) * x


def norms_that_gate_each_other(x: Tensor, y: Tensor, w: Tensor) -> Any:
    return per_token(F.silu(llama(x, w)) * llama(y, w))


def flattened_norms_that_are_added(x: Tensor, y: Tensor, w: Tensor) -> Any:
    one, other = (llama(each.view(1, -1, HIDDEN), w) for each in (x, y))
    codes = [per_token(each.view(-1, HIDDEN)) for each in (one, other)]
    return *codes[0], *codes[1], *per_token(llama(one + other, w).view(-1, HIDDEN))


FUNCTIONS = (
    a_norm_of_two_norms,
    a_tensor_added_to_itself_first,
    a_tensor_added_to_itself_last,
    a_tensor_gated_by_itself_first,
    norms_that_gate_each_other,
    flattened_norms_that_are_added,
)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_operands_that_look_alike_are_not_mixed_up(function: Callable[..., Any], dynamic: bool) -> None:
    def given(count: int) -> tuple[Tensor, Tensor, Tensor]:
        x = rows(count, HIDDEN, torch.bfloat16)
        return x, x.flip(0, 1), weights(HIDDEN, torch.bfloat16)

    gm = trace(function, *given(5), dynamic_rows=dynamic)
    assert sum(run_pass(one, gm).matches for one in PASSES) > 0
    assert "fuse_cache" not in str(gm.graph)
    for count in (5, 2) if dynamic else (5,):
        expected = function(*given(count))
        for mine, eager in zip(
            run(gm, *given(count)), expected if isinstance(expected, tuple) else (expected,), strict=True
        ):
            assert same_results(mine, eager)


def test_layers_that_share_a_trace_share_no_storage() -> None:
    def layers(x: Tensor, y: Tensor, w: Tensor) -> Any:
        one = llama(x, w)
        other = llama(one * 2, w)
        return (*(part * 2 for part in torch.split(one, HIDDEN // 2, -1)), other.relu())

    x = rows(5, HIDDEN, torch.bfloat16)
    gm = trace(layers, x, x, weights(HIDDEN, torch.bfloat16))
    for one in (raise_ir.PASS, lower_ir.PASS):
        assert run_pass(one, gm).matches == 2
    aliasing = Aliasing(gm.graph)
    (relu,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    (split,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.split.Tensor)
    first, last = split.args[0], relu.args[0]
    assert aliasing.root(first) is not aliasing.root(last)
    parts = [aliasing.root(part) for part in split.users]
    assert parts == [aliasing.root(first)] * 2
    # Inductor asks the fake values.
    shared = {node.meta["val"].untyped_storage()._cdata for node in (first, *split.users)}
    assert len(shared) == 1
    assert last.meta["val"].untyped_storage()._cdata not in shared
