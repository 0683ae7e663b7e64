"""Kernels against references and float64, fused against unfused, row against row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fuse_cache.kernels.fused_quant.op import PRODUCERS
from fuse_cache.kernels.launch import implementations
from tests.kernels.cases import BF16, FP16, FP32, PRODUCER_CASES, QUANTISER_CASES, Case, fused_case
from tests.kernels.truth import assert_same_bits, bits, steps_apart, wide_norm_or_act

HARDWARE, SOFTWARE = implementations("sm_90"), implementations("sm_80")
CROSS = [(p, q) for p in range(len(PRODUCER_CASES)) for q in range(len(QUANTISER_CASES))]
DTYPES, WIDTHS = (BF16, FP16, FP32), (64, 96, 2880)
_RESULTS: dict[tuple[str, int, int, torch.dtype], tuple[Tensor, ...]] = {}


def _several(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def _run(case: Case, tokens: int, hidden: int, dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
    return _several(HARDWARE[case.operator](*case.arguments(tokens, hidden, dtype)))


def _unfused(
    producer: Case, quantiser: Case, tokens: int, hidden: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Run the two kernels in sequence. Producers' results are kept: many quantisers read the same."""
    key = (producer.name, tokens, hidden, dtype)
    if key not in _RESULTS:
        _RESULTS[key] = _run(producer, tokens, hidden, dtype)
    value, *others = _RESULTS[key]
    arguments = quantiser.arguments(tokens, hidden, dtype)[1:]
    return (*_several(HARDWARE[quantiser.operator](value, *arguments)), value, *others)


def _check_fused(producer: Case, quantiser: Case, tokens: int, hidden: int, dtype: torch.dtype) -> None:
    width = quantiser.width(hidden)
    fused = _run(fused_case(producer, quantiser, True), tokens, width, dtype)
    for one, other in zip(fused, _unfused(producer, quantiser, tokens, width, dtype), strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("quantiser", QUANTISER_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("hidden", [96, 640])
def test_a_quantisation_equals_its_reference_bit_by_bit(quantiser: Case, hidden: int) -> None:
    hidden = quantiser.width(hidden)
    x, *rest = quantiser.arguments(9, hidden)
    nan = 1.0 if quantiser.tells_nan_sign else float("nan")
    x[1], x[2, 3], x[3, 5], x[4, 7], x[5] = 0.0, nan, float("inf"), float("-inf"), x[5] * 1e-30
    x[6], x[7, ::2] = x[6] * 1e30, -0.0
    expected = _several(quantiser.operator(x, *rest))
    for implementation in (HARDWARE, SOFTWARE):
        for one, other in zip(_several(implementation[quantiser.operator](x, *rest)), expected, strict=True):
            assert_same_bits(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("producer", PRODUCER_CASES, ids=lambda case: case.name)
def test_a_producer_equals_float64_within_its_roundings(producer: Case, dtype: torch.dtype) -> None:
    for hidden in (64, 96):
        arguments = producer.arguments(5, hidden, dtype)
        results = _several(HARDWARE[producer.operator](*arguments))
        family = PRODUCERS[producer.operator]
        for one, exact, reference in zip(
            results,
            wide_norm_or_act(producer, arguments),
            _several(family.reference(*arguments)),
            strict=True,
        ):
            assert (one.dtype, one.shape, one.stride()) == (
                reference.dtype,
                reference.shape,
                reference.stride(),
            )
            # A rounding loses half of eps; there are up to three of them, and the weight's.
            eps = max(torch.finfo(dtype).eps, torch.finfo(FP32).eps * 16)
            torch.testing.assert_close(
                one.double(), exact, rtol=2 * eps, atol=eps if dtype == FP32 else eps / 16
            )


@pytest.mark.parametrize("case", [*PRODUCER_CASES, *QUANTISER_CASES], ids=lambda case: case.name)
def test_no_tokens_are_legal(case: Case) -> None:
    hidden = case.width(96)
    expected = _several(case.operator(*case.arguments(0, hidden)))
    for one, other in zip(_run(case, 0, hidden), expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)


@pytest.mark.parametrize("quantiser", range(len(QUANTISER_CASES)))
def test_fused_equals_unfused_bit_by_bit(quantiser: int) -> None:
    # Every pair of a form and a key once, in one dtype and width each; the rest of the cross is slow.
    for index, producer in enumerate(PRODUCER_CASES):
        dtype, hidden = DTYPES[(index + quantiser) % 3], WIDTHS[(index * 2 + quantiser) % 3]
        _check_fused(producer, QUANTISER_CASES[quantiser], 1, hidden, dtype)


@pytest.mark.parametrize("index", [0, 4, 9, 12, 16, 19])
def test_a_row_does_not_depend_on_the_other_rows(index: int) -> None:
    quantiser = QUANTISER_CASES[index]
    producer = PRODUCER_CASES[(index * 5) % len(PRODUCER_CASES)]
    case = fused_case(producer, quantiser, False)
    hidden = quantiser.width(96)
    arguments = case.arguments(63, hidden)
    together = _several(HARDWARE[case.operator](*arguments))
    for row in (0, 31, 62):
        alone = _several(
            HARDWARE[case.operator](
                *(a[row : row + 1] if isinstance(a, Tensor) and a.dim() > 1 else a for a in arguments)
            )
        )
        for one, other in zip(together, alone, strict=True):
            if one.shape[0] == 63:  # Swizzled scales mix rows within a tile.
                assert torch.equal(bits(one)[row], bits(other)[0])


@pytest.mark.parametrize("width", [8192 + 64, 20000])
def test_a_long_row_is_gone_over_twice(width: int) -> None:
    for producer in (PRODUCER_CASES[8], PRODUCER_CASES[9]):
        _check_fused(producer, QUANTISER_CASES[4], 2, width, BF16)


def test_codes_are_at_most_one_step_from_float64() -> None:
    quantiser = QUANTISER_CASES[4]
    for producer in PRODUCER_CASES:
        case = fused_case(producer, quantiser, True)
        arguments = case.arguments(7, 96)
        codes, scale, *_ = _several(HARDWARE[case.operator](*arguments))
        exact = wide_norm_or_act(producer, producer.arguments(7, 96))[0]
        steps = steps_apart(codes, exact / (exact.abs().amax(-1, keepdim=True) / 448.0))
        assert int(steps.max()) <= 1, producer.name
        # Two or three roundings to 8 bits before one to 4 move the last at most in one of eight values.
        assert float((steps > 0).float().mean()) < 0.125, producer.name
        torch.testing.assert_close(
            scale.double(), exact.abs().amax(-1, keepdim=True) / 448.0, rtol=2**-6, atol=0
        )


@pytest.mark.slow
@pytest.mark.parametrize(("producer", "quantiser"), CROSS)
def test_the_whole_cross_at_one_token(producer: int, quantiser: int) -> None:
    for dtype in DTYPES:
        for hidden in WIDTHS:
            _check_fused(PRODUCER_CASES[producer], QUANTISER_CASES[quantiser], 1, hidden, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("quantiser", range(len(QUANTISER_CASES)))
def test_pairs_at_more_tokens(quantiser: int) -> None:
    for shift, (tokens, hidden) in enumerate([(63, 64), (63, 2880), (130, 96), (3, 8192)]):
        producer = PRODUCER_CASES[(quantiser + 5 * shift) % len(PRODUCER_CASES)]
        _check_fused(producer, QUANTISER_CASES[quantiser], tokens, hidden, DTYPES[(quantiser + shift) % 3])
