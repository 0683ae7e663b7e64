"""Fused operators against float64: every code and every scale is one that the graph's own roundings explain.

A code may differ from float64's where a threshold lies within those roundings, and there by one step: the
share that may differ is that of the thresholds. The references run here; that kernels have their bits is
tested in `interpreted/` and on GPUs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fuse_cache.kernels.fused_quant.op import FUSED
from fuse_cache.kernels.quant_fp8_static.op import QUANT_FP8_STATIC
from tests.kernels.cases import BF16, FP16, FP32, PRODUCER_CASES, QUANTISER_CASES, Case, fused_case
from tests.kernels.explained import codes_explained, exact, row_form, scales_explained
from tests.kernels.truth import assert_same_bits, bits

DTYPES, WIDTHS = (BF16, FP16, FP32), (64, 96, 2880)


def _several(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def _arguments(case: Case, tokens: int, hidden: int, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    """Return the arguments with other values: each seed scales and turns them by its own random numbers."""
    generator = torch.Generator().manual_seed(seed)
    arguments = case.arguments(tokens, hidden, dtype)
    return tuple(
        (a * torch.randn(a.shape, generator=generator)).to(a.dtype)
        if seed and isinstance(a, Tensor) and a.dim() == 2
        else a
        for a in arguments
    )


def check(producer: Case, quantiser: Case, tokens: int, hidden: int, dtype: torch.dtype, seed: int) -> None:
    width = quantiser.width(hidden)
    operator, fused = FUSED[producer.operator, quantiser.operator, False]
    mine = _arguments(producer, tokens, width, dtype, seed)
    _, factor, *_ = quantiser.tensors(tokens, width, dtype)
    rows = row_form(quantiser, dtype)
    results = _several(operator(*fused.arguments(mine, (None, factor, *rows))))
    laid_out = _several(operator(*fused.arguments(mine, (None, factor, *quantiser.attributes(dtype)))))
    assert_same_bits(laid_out[0], results[0])  # A layout of scales moves no code.
    wide = exact(producer, mine, dtype)
    scales = None if quantiser.operator == QUANT_FP8_STATIC else results[1]
    if scales is not None:
        assert bool(scales_explained(wide, factor, quantiser, scales, dtype).all())
    explained, steps = codes_explained(wide, factor, quantiser, results[0], scales, dtype)
    assert bool(explained.all()), f"{int((~explained).sum())} of {explained.numel()} codes"
    # So near to zero that float16 has no numbers there, and GELU's cancels, e5m2 has several.
    assert int(steps.max()) <= 1 or results[0].dtype == torch.float8_e5m2


@pytest.mark.parametrize("quantiser", QUANTISER_CASES, ids=lambda case: case.name)
def test_every_code_is_explained_by_the_roundings(quantiser: Case) -> None:
    for index, producer in enumerate(PRODUCER_CASES):
        check(producer, quantiser, 5, WIDTHS[index % 2], DTYPES[index % 3], seed=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "quantiser", range(len(QUANTISER_CASES)), ids=lambda place: QUANTISER_CASES[place].name
)
def test_every_code_is_explained_by_the_roundings_whatever_the_values(quantiser: int) -> None:
    for index, producer in enumerate(PRODUCER_CASES):
        for seed, hidden in enumerate(WIDTHS):
            check(
                producer, QUANTISER_CASES[quantiser], 5, hidden, DTYPES[(index + quantiser + seed) % 3], seed
            )


def test_one_step_too_many_is_noticed() -> None:
    # The tests above must be able to fail: a code moved by two, a scale by a thousandth.
    producer, quantiser = PRODUCER_CASES[0], QUANTISER_CASES[4]
    operator, fused = FUSED[producer.operator, quantiser.operator, False]
    mine = producer.arguments(5, 96, FP32)
    codes, scales = operator(*fused.arguments(mine, (None, None, *quantiser.attributes(FP32))))
    wide = exact(producer, mine, FP32)
    moved = (codes.view(torch.uint8) ^ 2).view(codes.dtype)
    explained, steps = codes_explained(wide, None, quantiser, moved, scales, FP32)
    assert not bool(explained.any())
    assert int(steps.min()) >= 1
    assert not bool(scales_explained(wide, None, quantiser, scales * 1.001, FP32).any())


@pytest.mark.parametrize("quantiser", range(len(QUANTISER_CASES)))
def test_a_row_does_not_depend_on_the_other_rows(quantiser: int) -> None:
    for shift in range(3):
        producer = PRODUCER_CASES[(quantiser * 3 + shift * 5) % len(PRODUCER_CASES)]
        rows_alone(producer, QUANTISER_CASES[quantiser], 63, 96, DTYPES[shift])


@pytest.mark.slow
@pytest.mark.parametrize("producer", PRODUCER_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(("tokens", "hidden"), [(16384, 64), (1000, 2880), (64, 8192), (2, 16384)])
def test_a_row_is_the_same_among_many_and_alone(producer: Case, tokens: int, hidden: int) -> None:
    # One quantiser of each kind: static, per token, by group, NVFP4.
    for index in (0, 4, 9, 19):
        rows_alone(producer, QUANTISER_CASES[index], tokens, hidden, BF16)


def rows_alone(producer: Case, quantiser: Case, tokens: int, hidden: int, dtype: torch.dtype) -> None:
    case = fused_case(producer, quantiser, True)
    arguments = case.arguments(tokens, case.width(hidden), dtype)
    together = _several(case.operator(*arguments))
    for row in sorted({0, tokens // 2, tokens - 1}):
        alone = (a[row : row + 1] if isinstance(a, Tensor) and a.dim() > 1 else a for a in arguments)
        for one, other in zip(together, _several(case.operator(*alone)), strict=True):
            if one.shape[0] == tokens:  # Swizzled scales mix rows within a tile.
                assert torch.equal(bits(one)[row], bits(other)[0])
