"""Norm + static FP8: fused bit for bit where only the codes are wanted, else left with one reason."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fuse_cache.passes import lower_ir, norm_quant, raise_ir
from fuse_cache.passes.base import Outcome, Reason
from fuse_cache.passes.inline import Inliner
from tests.passes.graphs import aot_graph, call, run_pass, same_bits, same_results, targets
from tests.passes.spellings import FP8, NORMS, QUANTS, divide, divide_wide, llama, olmo, rows, weights

FUSED = "fuse_cache.rms_norm_quant_fp8_static.default"
KEPT = "fuse_cache.rms_norm_quant_fp8_static_keep.default"


def fuse(
    function: Callable[..., Any], *args: Tensor, dynamic: bool = False
) -> tuple[fx.GraphModule, Outcome]:
    gm = aot_graph(function, *args, dynamic_rows=dynamic)
    run_pass(raise_ir.PASS, gm)
    return gm, run_pass(norm_quant.PASS, gm)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("norm", "quant"), list(zip(NORMS.values(), itertools.cycle(QUANTS.values()), strict=False))
)
def test_a_norm_that_only_a_quantisation_reads_is_fused_bit_for_bit(
    norm: Callable[..., Tensor], quant: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    def block(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return quant(norm(x, weight), scale)

    x, weight, scale = rows(7, 96, dtype), weights(96, dtype), torch.tensor(0.0371)
    for dynamic in (False, True):
        gm, outcome = fuse(block, x, weight, scale, dynamic=dynamic)
        assert (outcome.candidates, outcome.matches, outcome.near_misses) == (1, 1, [])
        assert targets(gm) == [FUSED]
        expected = block(x, weight, scale)
        assert same_bits(call(gm, x, weight, scale)[0], expected)
        run_pass(lower_ir.PASS, gm)
        assert not any("fuse_cache" in name for name in targets(gm))
        assert same_bits(call(gm, x, weight, scale)[0], expected)


def test_the_saved_traffic_is_one_write_and_one_read_of_the_norm() -> None:
    def block(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return divide(llama(x, weight), scale)

    arguments = rows(7, 96, torch.bfloat16), weights(96, torch.bfloat16), torch.tensor(0.1)
    assert fuse(block, *arguments)[1].bytes_saved == 2 * 7 * 96 * 2
    assert fuse(block, *arguments, dynamic=True)[1].bytes_saved == 0


def norm_is_returned(x: Tensor, weight: Tensor, scale: Tensor) -> object:
    norm = llama(x, weight)
    return divide(norm, scale), norm


def norm_feeds_a_router(x: Tensor, weight: Tensor, scale: Tensor) -> object:
    norm = llama(x, weight)
    return divide(norm, scale), norm @ norm.t()


@pytest.mark.parametrize("function", [norm_is_returned, norm_feeds_a_router])
def test_a_norm_that_others_read_too_is_fused_and_returned_as_well(function: Callable[..., Any]) -> None:
    arguments = rows(6, 64, torch.bfloat16), weights(64, torch.bfloat16), torch.tensor(0.0371)
    gm, outcome = fuse(function, *arguments)
    assert (outcome.candidates, outcome.matches, outcome.near_misses) == (1, 1, [])
    assert KEPT in targets(gm)
    assert outcome.bytes_saved == 6 * 64 * 2  # It is still written, but not read again.
    run_pass(lower_ir.PASS, gm)
    for one, other in zip(call(gm, *arguments), function(*arguments), strict=True):
        assert same_results(one, other)


def two_scales(x: Tensor, weight: Tensor, scale: Tensor) -> object:
    norm = llama(x, weight)
    return divide(norm, scale), divide(norm, scale + 1)


def scale_from_the_norm(x: Tensor, weight: Tensor, scale: Tensor) -> object:
    norm = llama(x, weight)
    return divide_wide(norm, norm.float().sum() / 448)


def scale_of_all_rows(x: Tensor, weight: Tensor, scale: Tensor) -> object:
    norm = llama(x, weight)
    return divide_wide(norm, norm.float().abs().amax() / 448)


def a_view_between(x: Tensor, weight: Tensor, scale: Tensor) -> object:
    return divide(llama(x, weight).view(-1), scale)


def a_cast_between(x: Tensor, weight: Tensor, scale: Tensor) -> object:
    return divide_wide(olmo(x, weight).to(torch.float16), scale)


def no_norm(x: Tensor, weight: Tensor, scale: Tensor) -> object:
    return divide(x * 2, scale)


def no_quant(x: Tensor, weight: Tensor, scale: Tensor) -> object:
    return llama(x, weight) + scale


@pytest.mark.parametrize(
    ("function", "reasons"),
    [
        (two_scales, [Reason.EXTRA_USER]),
        (scale_from_the_norm, [Reason.EXTRA_USER, Reason.EXTRA_USER]),
        (scale_of_all_rows, [Reason.GUARD, Reason.GUARD]),
        (a_view_between, [Reason.EXTRA_VIEW, Reason.EXTRA_VIEW]),
        (a_cast_between, [Reason.CAST_BETWEEN, Reason.CAST_BETWEEN]),
        (no_norm, [Reason.NO_PARTNER]),
        (no_quant, [Reason.NO_PARTNER]),
    ],
)
def test_each_unfused_candidate_has_exactly_one_reason_and_keeps_its_bits(
    function: Callable[..., Any], reasons: list[Reason]
) -> None:
    arguments = rows(6, 64, torch.bfloat16), weights(64, torch.bfloat16), torch.tensor(0.0371)
    gm, outcome = fuse(function, *arguments)
    assert [miss.reason for miss in outcome.near_misses] == reasons
    assert outcome.candidates == len(outcome.near_misses) + outcome.matches
    assert outcome.matches == (function is two_scales)
    expected = function(*arguments)
    expected = expected if isinstance(expected, tuple) else (expected,)
    run_pass(lower_ir.PASS, gm)
    assert all(same_bits(a, b) for a, b in zip(call(gm, *arguments), expected, strict=True))


def test_the_reasons_say_which_node_and_what_stands_between() -> None:
    arguments = rows(6, 64, torch.bfloat16), weights(64, torch.bfloat16), torch.tensor(0.0371)
    gm, outcome = fuse(a_view_between, *arguments)
    names = {node.name for node in gm.graph.nodes}
    assert all(miss.node in names for miss in outcome.near_misses)
    assert "view" in outcome.near_misses[0].detail


def test_many_layers_are_all_fused_and_written_out_from_one_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        for _ in range(5):
            x = divide(llama(x, weight), scale).to(x.dtype)
        return x

    traces = []
    original = Inliner._trace

    def counted(self: Inliner, *args: Any, **kwargs: Any) -> fx.GraphModule:
        before = len(self._traced)
        found = original(self, *args, **kwargs)
        traces.append(len(self._traced) - before)
        return found

    monkeypatch.setattr(Inliner, "_trace", counted)
    arguments = rows(6, 64, torch.bfloat16), weights(64, torch.bfloat16), torch.tensor(0.5)
    gm, outcome = fuse(model, *arguments)
    assert outcome.matches == 5
    run_pass(lower_ir.PASS, gm)
    assert traces == [1, 0, 0, 0, 0]
    assert same_bits(call(gm, *arguments)[0], model(*arguments))


def test_the_patterns_shown_to_people_are_fused_and_compute_the_same() -> None:
    for pattern in norm_quant.PASS.patterns:
        inputs = pattern.example_inputs()
        expected = pattern.search(*inputs)
        gm, outcome = fuse(pattern.search, *inputs)
        assert (outcome.matches, targets(gm)) == (1, [FUSED])
        replaced = pattern.replacement(*inputs)
        assert isinstance(expected, Tensor)
        assert isinstance(replaced, Tensor)
        assert expected.dtype == FP8
        assert same_bits(replaced, expected)
