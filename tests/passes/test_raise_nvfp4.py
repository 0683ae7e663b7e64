"""NVFP4: raised with all attributes read off the graph, fused behind any producer, or left with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fuse_cache.kernels.quant_nvfp4.reference import BITS
from fuse_cache.passes import act_quant, norm_quant, raise_ir
from fuse_cache.passes.base import Reason
from tests.passes import spellings_nvfp4 as nvfp4
from tests.passes.graphs import run_pass, same_results, targets
from tests.passes.spellings import FP8, llama, rows, weights
from tests.passes.spellings_more import ADD_NORMS, GATES
from tests.passes.spellings_nvfp4 import NVFP4, codes_by_counting, groups_of, pack_slices
from tests.passes.tracing import run, trace

WHOLE = torch.tensor(0.0371)


def x_and_weight(count: int = 7, size: int = 96) -> tuple[Tensor, Tensor]:
    return rows(count, size, torch.bfloat16), weights(size, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("divided", ["divide", None, "divide", 2**-6, "multiply", "divide", "none", BITS, True, True, True]),
        ("alone", ["divide", None, "none", 2**-6, "none", "divide", "none", BITS, True, True, False]),
        ("multiplied", ["reciprocal", None, "multiply", -448.0, *["reciprocal"] * 3, 0, True, True, False]),
        (
            "multiplied_once",
            [
                "reciprocal",
                None,
                "multiply",
                None,
                "reciprocal",
                "reciprocal",
                "scale",
                7,
                False,
                False,
                True,
            ],
        ),
        (
            "narrow",
            ["divide", torch.bfloat16, "multiply", None, "divide", "divide", "none", 0, False, False, False],
        ),
    ],
)
def test_every_rounding_and_every_bound_is_an_attribute(name: str, attributes: list[Any]) -> None:
    if name == "multiplied":
        attributes[6] = "reciprocals"
    gm = trace(NVFP4[name], x_and_weight()[0], WHOLE)
    assert run_pass(raise_ir.PASS, gm).matches == 1
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.fuse_cache.quant_nvfp4.default)
    assert list(node.args[2:]) == attributes


@pytest.mark.parametrize("name", NVFP4)
def test_it_is_fused_behind_a_sum_and_behind_an_activation(name: str) -> None:
    def sums(x: Tensor, weight: Tensor, whole: Tensor) -> tuple[Tensor, ...]:
        norm, total = ADD_NORMS["add_llama"](x, x.cos(), weight)
        return (*NVFP4[name](norm, whole), total)

    def gates(x: Tensor, weight: Tensor, whole: Tensor) -> tuple[Tensor, ...]:
        return NVFP4[name](GATES["chunked"](x, x.cos()), whole)

    given = (*x_and_weight(), WHOLE)
    for block, fused in ((sums, "fused_add_rms_norm_quant_nvfp4"), (gates, "act_and_mul_quant_nvfp4")):
        gm = trace(block, *given)
        assert run_pass(raise_ir.PASS, gm).near_misses == []
        assert run_pass(norm_quant.PASS, gm).matches + run_pass(act_quant.PASS, gm).matches == 1
        assert f"fuse_cache.{fused}.default" in targets(gm)
        for found, expected in zip(run(gm, *given), block(*given), strict=True):
            assert same_results(found, expected)


def fake_quantised(x: Tensor, whole: Tensor) -> Tensor:
    groups = groups_of(x)
    scale = (groups.abs().amax(-1, keepdim=True) / 6.0 * whole).clamp(max=448.0).to(FP8)
    return (groups / (scale.float() / whole)).clamp(-6, 6).round()


def ties_away(x: Tensor, whole: Tensor) -> Tensor:
    return _coded(x, whole, lambda v: codes_by_counting(torch.nextafter(v, v * 2)))


def another_threshold(x: Tensor, whole: Tensor) -> Tensor:
    return _coded(x, whole, lambda v: codes_by_counting(torch.where(v == 4.9999995, 5.5, v)))


def high_nibble_first(x: Tensor, whole: Tensor) -> Tensor:
    return _coded(x, whole, codes_by_counting, lambda codes: (codes[..., ::2] << 4) | codes[..., 1::2])


def unbounded(x: Tensor, whole: Tensor) -> Tensor:
    return _coded(x, whole, codes_by_counting, bound=None)


def another_bound(x: Tensor, whole: Tensor) -> Tensor:
    return _coded(x, whole, codes_by_counting, bound=256.0)


def multiplied_first(x: Tensor, whole: Tensor) -> Tensor:
    return _coded(x, whole, codes_by_counting, scaled=lambda amax: amax * whole / 6.0)


def scaled_narrow(x: Tensor, whole: Tensor) -> Tensor:
    groups = x.view(x.shape[0], -1, 16)
    scale = (groups.abs().amax(-1).float() / 6.0).clamp(max=448.0).to(FP8)
    return pack_slices(codes_by_counting((groups / scale.to(x.dtype).unsqueeze(-1)).float()).view(x.shape))


def _coded(
    x: Tensor,
    whole: Tensor,
    code: Callable[[Tensor], Tensor],
    pack: Callable[[Tensor], Tensor] = pack_slices,
    bound: float | None = 448.0,
    scaled: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    groups = groups_of(x)
    amax = groups.abs().amax(-1)
    scale = amax / 6.0 * whole if scaled is None else scaled(amax)
    codes = (scale if bound is None else scale.clamp(max=bound)).to(FP8)
    return pack(code((groups / (codes.float() / whole).unsqueeze(-1)).view(x.shape)))


@pytest.mark.parametrize(
    ("function", "reason", "word"),
    [
        (fake_quantised, Reason.OTHER_SPELLING, "not packed"),
        (ties_away, Reason.OTHER_SPELLING, "ties to even"),
        (another_threshold, Reason.OTHER_SPELLING, "ties to even"),
        (high_nibble_first, Reason.OTHER_SPELLING, "high nibble"),
        (unbounded, Reason.OTHER_SPELLING, "bounded by None"),
        (another_bound, Reason.OTHER_SPELLING, "bounded by 256.0"),
        (multiplied_first, Reason.OTHER_SPELLING, "largest value"),
        (scaled_narrow, Reason.OTHER_SPELLING, "another scale"),
    ],
)
def test_what_is_not_raised_has_one_reason(function: Callable[..., Any], reason: Reason, word: str) -> None:
    gm = trace(function, x_and_weight()[0], WHOLE)
    before = targets(gm)
    outcome = run_pass(raise_ir.PASS, gm)
    (miss,) = outcome.near_misses
    assert (miss.reason, outcome.candidates, outcome.matches) == (reason, 1, 0)
    assert word in miss.detail
    assert targets(gm) == before


def test_a_global_scale_that_comes_from_all_rows_is_raised_and_not_fused() -> None:
    def block(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        norm = llama(x, weight)
        return NVFP4["divided"](norm, norm.float().abs().amax() / (448.0 * 6.0))

    gm = trace(block, *x_and_weight())
    assert run_pass(raise_ir.PASS, gm).near_misses == []
    misses = run_pass(norm_quant.PASS, gm).near_misses
    assert {miss.reason for miss in misses} == {Reason.EXTRA_USER}


@pytest.mark.parametrize("name", ["codes_by_counting", "codes_by_bits", "codes_by_table", "codes_by_masks"])
def test_the_spellings_round_to_the_nearest_and_ties_to_even(name: str) -> None:
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.linspace(-7, 7, 14 * 32 + 1)
    codes = getattr(nvfp4, name)(values).to(torch.int64)
    distance = (values.abs().clamp(max=6.0)[:, None] - numbers).abs()
    chosen = distance.gather(1, (codes & 7)[:, None])[:, 0]
    assert torch.equal(chosen, distance.min(1).values)
    ties = (distance == chosen[:, None]).sum(1) == 2
    assert ties.sum() == 14
    assert bool(((codes[ties] & 1) == 0).all())
    assert torch.equal((codes & 8) != 0, values < 0)
