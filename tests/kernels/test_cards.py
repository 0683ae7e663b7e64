"""Numbers worked out by hand, from bug reports on the same operations (cards N1, N2, N5, N6)."""

from __future__ import annotations

import pytest
import torch

from fuse_cache.kernels.act_and_mul.reference import SILU, act_and_mul
from fuse_cache.kernels.fused_add_rms_norm.reference import fused_add_rms_norm
from fuse_cache.kernels.obstacles import obstacle
from fuse_cache.kernels.quant_dynamic.op import QUANT_DYNAMIC
from fuse_cache.kernels.quant_dynamic.reference import quant_dynamic
from fuse_cache.kernels.quant_fp8_static.reference import quant_fp8_static
from fuse_cache.kernels.rms_norm.op import RMS_NORM
from fuse_cache.kernels.rms_norm.reference import rms_norm
from fuse_cache.kernels.scaling import DIVIDE, RECIPROCAL
from tests.kernels.cases import MIN_SCALE, PRODUCER_CASES, QUANTISER_CASES, Case, fused_case

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


@pytest.mark.parametrize(("rounded", "last"), [(False, 1.7265625), (True, 1.734375)])
def test_the_sum_is_rounded_before_the_norm_or_is_not(rounded: bool, last: float) -> None:
    x = torch.ones(1, 4, dtype=BF16)
    residual = torch.tensor([[2**-8, 2**-8, 2**-8, 2.0]], dtype=BF16)
    weight = torch.ones(4, dtype=BF16)
    y, total = fused_add_rms_norm(x, residual, weight, 1e-6, 0.0, None, BF16, None, BF16, rounded)
    assert total.tolist() == [[1.0, 1.0, 1.0, 3.0]]
    assert y[0, 3].item() == last
    codes = quant_fp8_static(y, torch.tensor(1 / 128), DIVIDE, FP32, -448.0, 448.0, FP8)
    assert codes.float().tolist() == [[72.0, 72.0, 72.0, 224.0]]


def test_a_weight_keeps_its_own_precision() -> None:
    x = torch.tensor([[3.0, 1.0, 1.0, 1.0]], dtype=BF16)
    weight = torch.full((4,), 0.05).to(BF16)
    y = rms_norm(x, weight, 1e-6, 1.0, FP32, None, BF16)
    assert y.tolist() == [[1.8203125, 0.60546875, 0.60546875, 0.60546875]]
    codes = quant_fp8_static(y, torch.tensor(1 / 64), DIVIDE, FP32, -448.0, 448.0, FP8)
    assert codes.float().tolist() == [[120.0, 40.0, 40.0, 40.0]]


def test_small_and_empty_rows_have_the_least_scale() -> None:
    x = torch.tensor([[0.0, 0, 0, 0], [1, -2, 3, -4], [1e-9, 0, 0, 0]])
    scale = (None, None, DIVIDE, 448.0, None, MIN_SCALE, "none")
    codes, scales = quant_dynamic(x, None, 0, *scale, DIVIDE, FP32, -448.0, 448.0, FP8, "row")
    assert codes.float().tolist() == [[0.0] * 4, [112.0, -224.0, 320.0, -448.0], [0.0] * 4]
    torch.testing.assert_close(scales[:, 0], torch.tensor([4.3596542e-6, 0.0089285718, 4.3596542e-6]))


def test_silu_takes_no_shortcut_and_rounds_where_it_is_told() -> None:
    gate = torch.tensor([[-10.0, -20, 0, 1, 3]])
    up = torch.tensor([[1024.0, 2.0**30, 5, 2, 0.5]])
    expected = torch.tensor([[-0.4648742, -44.26294, 0.0, 1.4621172, 1.4288613]])
    torch.testing.assert_close(act_and_mul(gate, up, SILU, None, None, None), expected)
    gate, up = torch.tensor([[2.234375]], dtype=BF16), torch.tensor([[0.71875]], dtype=BF16)
    attributes = (torch.tensor(0.05), RECIPROCAL, FP32, -448.0, 448.0, FP8)
    first = act_and_mul(gate, up, SILU, None, BF16, None)
    never = act_and_mul(gate, up, SILU, None, None, None)
    assert quant_fp8_static(first, *attributes).float().item() == 28.0
    assert quant_fp8_static(never, *attributes).float().item() == 30.0


@pytest.mark.parametrize("case", [*PRODUCER_CASES, *QUANTISER_CASES], ids=lambda case: case.name)
def test_every_case_of_the_tests_has_a_kernel(case: Case) -> None:
    for target in ("sm_80", "sm_90", "sm_100"):
        assert obstacle(case.operator, case.arguments(4, case.width(96)), target) is None


def test_what_has_no_kernel_says_why() -> None:
    norm = fused_case(PRODUCER_CASES[0], QUANTISER_CASES[4], False)
    arguments = norm.arguments(4, 96)
    assert obstacle(norm.operator, arguments, "sm_70") == "there are no kernels for sm_70"
    assert obstacle(norm.operator, arguments, "gfx942") == "gfx942 has no kernel for float8_e4m3fn"
    attributes = PRODUCER_CASES[0].attributes(BF16)
    wide, columns = torch.ones(1, 20000, dtype=BF16), torch.ones(96, 4, dtype=BF16).t()
    assert "20000 is longer than 16384" in str(obstacle(RMS_NORM, (wide, None, *attributes), "sm_90"))
    assert "neighbours" in str(obstacle(RMS_NORM, (columns, None, *attributes), "sm_90"))
    group = next(case for case in QUANTISER_CASES if case.name == "group128")
    x, *rest = group.arguments(4, 128)
    assert "multiple of the group of 128" in str(obstacle(QUANT_DYNAMIC, (x[:, :96], *rest), "sm_90"))
