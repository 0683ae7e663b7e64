"""Raising: every spelling becomes an IR node that means exactly the same; what is not raised says why."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fuse_cache.passes import raise_ir
from fuse_cache.passes.base import Reason
from tests.passes.graphs import aot_graph, call, run_pass, same_bits, targets
from tests.passes.spellings import FP8, NORMS, QUANTS, Norm, Quant, llama, rows, weights

RMS_NORM = "fuse_cache.rms_norm.default"
QUANT = "fuse_cache.quant_fp8_static.default"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_every_norm_is_raised_and_keeps_its_bits(norm: Norm, dtype: torch.dtype, dynamic: bool) -> None:
    x, weight = rows(7, 96, dtype), weights(96, dtype)
    gm = aot_graph(norm, x, weight, dynamic_rows=dynamic)
    outcome = run_pass(raise_ir.PASS, gm)
    assert (outcome.candidates, outcome.matches, outcome.near_misses) == (1, 1, [])
    assert targets(gm) == [RMS_NORM]
    for count in (7, 1, 12) if dynamic else (7,):
        others = rows(count, 96, dtype, seed=count)
        assert same_bits(call(gm, others, weight)[0], norm(others, weight))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("quant", QUANTS.values(), ids=QUANTS)
def test_every_quantisation_is_raised_and_keeps_its_bits(
    quant: Quant, dtype: torch.dtype, dynamic: bool
) -> None:
    x, scale = rows(7, 96, dtype), torch.tensor(0.0371)
    gm = aot_graph(quant, x, scale, dynamic_rows=dynamic)
    outcome = run_pass(raise_ir.PASS, gm)
    assert (outcome.candidates, outcome.matches, outcome.near_misses) == (1, 1, [])
    assert targets(gm) == [QUANT]
    for count in (7, 1, 12) if dynamic else (7,):
        others = rows(count, 96, dtype, seed=count)
        assert same_bits(call(gm, others, scale)[0], quant(others, scale))


def test_a_scale_with_one_dimension_widens_the_division_as_in_eager() -> None:
    x, scale = rows(5, 64, torch.bfloat16), torch.tensor([0.0371])
    gm = aot_graph(QUANTS["divide"], x, scale)
    assert run_pass(raise_ir.PASS, gm).matches == 1
    assert same_bits(call(gm, x, scale)[0], QUANTS["divide"](x, scale))


def test_a_wide_weight_keeps_its_precision() -> None:
    # Card N2 of the bug reports: a weight rounded to bfloat16 would give other codes.
    x = torch.tensor([[3.0, 1.0, 1.0, 1.0]], dtype=torch.bfloat16)
    weight = torch.full((4,), 0.05, dtype=torch.bfloat16)

    def block(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return QUANTS["divide_wide"](NORMS["gemma"](x, weight), scale)

    gm = aot_graph(block, x, weight, torch.tensor(1 / 64))
    assert run_pass(raise_ir.PASS, gm).matches == 2
    (codes,) = call(gm, x, weight, torch.tensor(1 / 64))
    assert codes.float().tolist() == [[120.0, 40.0, 40.0, 40.0]]


def mean_over_rows(x: Tensor, weight: Tensor) -> Tensor:
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(0, keepdim=True) + 1e-6)).to(x.dtype) * weight


def without_keepdim(x: Tensor, weight: Tensor) -> Tensor:
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1) + 1e-6).unsqueeze(-1)).to(x.dtype) * weight


def variance_is_returned(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x.float()
    variance = h.pow(2).mean(-1, keepdim=True)
    return weight * (h * torch.rsqrt(variance + 1e-6)).to(x.dtype), variance


def root_is_returned(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x.float()
    root = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * (h * root).to(x.dtype), root


def eps_is_a_tensor(x: Tensor, weight: Tensor) -> Tensor:
    h = x.float()
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + weight[0].float())).to(x.dtype)


def eps_is_scaled(x: Tensor, weight: Tensor) -> Tensor:
    h = x.float()
    variance = torch.add(h.pow(2).mean(-1, keepdim=True), 0.5, alpha=2)
    return weight * (h * torch.rsqrt(variance)).to(x.dtype)


def double_mean(x: Tensor, weight: Tensor) -> Tensor:
    h = x.float()
    variance = h.pow(2).mean(-1, keepdim=True, dtype=torch.float64)
    return weight * (h * torch.rsqrt(variance + 1e-6)).to(x.dtype)


def other_factor(x: Tensor, weight: Tensor) -> Tensor:
    h = x.float()
    return (h + 1.0) * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def narrow_variance(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * weight


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (mean_over_rows, Reason.OTHER_SPELLING),
        (without_keepdim, Reason.OTHER_SPELLING),
        (variance_is_returned, Reason.EXTRA_USER),
        (root_is_returned, Reason.EXTRA_USER),
        (eps_is_a_tensor, Reason.OTHER_SPELLING),
        (eps_is_scaled, Reason.OTHER_SPELLING),
        (double_mean, Reason.DTYPE),
        (other_factor, Reason.OTHER_SPELLING),
        (narrow_variance, Reason.DTYPE),
    ],
)
def test_what_only_looks_like_a_norm_is_left_alone_with_one_reason(
    function: Callable[..., object], reason: Reason
) -> None:
    x, weight = rows(6, 64, torch.bfloat16), weights(64, torch.bfloat16)
    gm = aot_graph(function, x, weight)
    before = targets(gm)
    outcome = run_pass(raise_ir.PASS, gm)
    assert [miss.reason for miss in outcome.near_misses] == [reason]
    assert (outcome.candidates, outcome.matches) == (1, 0)
    assert targets(gm) == before


def scale_per_column(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / (scale + x[0].float())).clamp(-448, 448).to(FP8)


def constant_scale(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / 0.05).clamp(-448, 448).to(FP8)


def unscaled(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() - scale).to(FP8)


def rounded_between_clamp_and_codes(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(-448, 448).to(torch.bfloat16).to(FP8)


def rounded_bound(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp(-447.3, 447.3).to(FP8)


def wide_scale(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale.double()).float().clamp(-448, 448).to(FP8)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (scale_per_column, Reason.OP_MISSING),
        (constant_scale, Reason.OTHER_SPELLING),
        (unscaled, Reason.OTHER_SPELLING),
        (rounded_between_clamp_and_codes, Reason.CAST_BETWEEN),
        (rounded_bound, Reason.OTHER_SPELLING),
        (wide_scale, Reason.DTYPE),
    ],
)
def test_what_only_looks_like_a_static_quantisation_is_left_alone_with_one_reason(
    function: Quant, reason: Reason
) -> None:
    x, scale = rows(6, 64, torch.bfloat16), torch.tensor(0.0371)
    gm = aot_graph(function, x, scale)
    outcome = run_pass(raise_ir.PASS, gm)
    assert [miss.reason for miss in outcome.near_misses] == [reason]
    assert QUANT not in targets(gm)


def test_changing_one_literal_never_changes_a_result() -> None:
    # Case 37: another reduce dimension, another bound, another exponent.
    def cubed(x: Tensor, weight: Tensor) -> Tensor:
        h = x.float()
        return weight * (h * torch.rsqrt(h.pow(4).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def bounded(x: Tensor, scale: Tensor) -> Tensor:
        return (x.float() / scale).clamp(-240, 240).to(FP8)

    square = rows(8, 8, torch.float32)
    for function, other in ((cubed, weights(8, torch.float32)), (bounded, torch.tensor(0.01))):
        gm = aot_graph(function, square, other)
        run_pass(raise_ir.PASS, gm)
        assert same_bits(call(gm, square, other)[0], function(square, other))


def test_a_norm_that_is_read_twice_is_raised_once() -> None:
    def block(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        norm = llama(x, weight)
        return norm.relu(), norm.sum(-1)

    x, weight = rows(6, 64, torch.bfloat16), weights(64, torch.bfloat16)
    gm = aot_graph(block, x, weight)
    assert run_pass(raise_ir.PASS, gm).matches == 1
    assert targets(gm).count(RMS_NORM) == 1
    assert all(same_bits(a, b) for a, b in zip(call(gm, x, weight), block(x, weight), strict=True))


def test_a_result_with_another_number_of_elements_replaces_nothing() -> None:
    one = torch.empty(4, 6, dtype=torch.bfloat16)
    assert raise_ir._difference(one, torch.empty(24)) is None
    assert raise_ir._difference(one, torch.empty(2, 6)) is not None
