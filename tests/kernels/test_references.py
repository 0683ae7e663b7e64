"""The references are the truth: float64 within the roundings that they name."""

from __future__ import annotations

import pytest
import torch

from fuse_cache.kernels.fused_quant.op import FUSED
from fuse_cache.kernels.quant_fp8_static.op import QUANT_FP8_STATIC
from fuse_cache.kernels.quant_fp8_static.reference import quant_fp8_static
from fuse_cache.kernels.rms_norm.op import RMS_NORM
from fuse_cache.kernels.rms_norm.reference import rms_norm
from fuse_cache.kernels.scaling import DIVIDE, MULTIPLY, RECIPROCAL

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("tokens", [0, 1, 63])
@pytest.mark.parametrize("hidden", [64, 96, 2880])
def test_the_norm_equals_float64_within_one_rounding(tokens: int, hidden: int) -> None:
    x, weight = torch.randn(tokens, hidden), torch.randn(hidden)
    wide = x.double()
    expected = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + 1e-6) * (weight.double() + 1.0)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6, 1.0).double(), expected, rtol=2e-6, atol=1e-7)


def test_the_norm_rounds_where_it_is_told() -> None:
    x = torch.randn(5, 96, dtype=torch.bfloat16)
    weight = torch.randn(96, dtype=torch.bfloat16)
    before = rms_norm(x, weight, 1e-6, norm_dtype=torch.bfloat16)
    after = rms_norm(x, weight, 1e-6, out_dtype=torch.bfloat16)
    assert before.dtype == after.dtype == torch.bfloat16
    assert not torch.equal(before, after)
    assert rms_norm(x, weight, 1e-6).dtype == torch.float32


def test_edges_of_the_format() -> None:
    # Card N5 of the bug reports: the clamp must be explicit, infinity is clamped, NaN stays.
    x = torch.tensor([448, 449, 464, 465, 500, 1e4, float("inf"), float("-inf"), float("nan")])
    codes = quant_fp8_static(x, torch.tensor(1.0), DIVIDE, torch.float32, -448.0, 448.0, FP8).float()
    assert codes[:8].tolist() == [448.0] * 7 + [-448.0]
    assert codes[8].isnan()


def test_dividing_and_multiplying_by_the_reciprocal_are_not_the_same() -> None:
    x, scale = torch.randn(1000, dtype=torch.float32) * 3, torch.tensor(0.0371)
    arguments = (torch.float32, -448.0, 448.0, torch.float8_e5m2)
    divided = quant_fp8_static(x, scale, DIVIDE, *arguments)
    assert torch.equal(
        quant_fp8_static(x, scale, RECIPROCAL, *arguments).view(torch.uint8),
        quant_fp8_static(x, scale.reciprocal(), MULTIPLY, *arguments).view(torch.uint8),
    )
    exact = (x.double() / scale.double()).clamp(-448, 448)
    assert (divided.double() - exact).abs().max() <= 0.125 * exact.abs().max()  # two mantissa bits


@pytest.mark.parametrize("tokens", [0, 1, 63])
def test_the_fused_operator_is_legal_on_any_number_of_rows(tokens: int) -> None:
    x, weight = torch.randn(tokens, 64, dtype=torch.bfloat16), torch.randn(64, dtype=torch.bfloat16)
    attributes = (DIVIDE, torch.bfloat16, -448.0, 448.0, FP8)
    fused, _ = FUSED[RMS_NORM, QUANT_FP8_STATIC, False]
    codes = fused(x, weight, torch.tensor(0.1), 1e-6, 0.0, None, torch.bfloat16, None, *attributes)
    norm = rms_norm(x, weight, 1e-6, norm_dtype=torch.bfloat16)
    expected = quant_fp8_static(norm, torch.tensor(0.1), *attributes)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))


def test_a_row_does_not_depend_on_the_other_rows() -> None:
    x = torch.randn(4096, 96, dtype=torch.bfloat16)
    weight = torch.randn(96, dtype=torch.bfloat16)
    together = rms_norm(x, weight, 1e-6, norm_dtype=torch.bfloat16)
    alone = torch.cat(
        [rms_norm(x[i : i + 1], weight, 1e-6, norm_dtype=torch.bfloat16) for i in range(0, 4096, 97)]
    )
    assert torch.equal(together[::97], alone)
