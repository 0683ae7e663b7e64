"""A linear layer that quantises each row of what it reads to INT8, as torchao's dynamic one does, in ATen.

The operator sequence is torchao's; the module is plain tensors, so that no tensor subclass hides it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fuse_cache.passes import raise_ir
from fuse_cache.passes.base import Reason
from tests.passes.graphs import run_pass, targets
from tests.passes.pipeline import assert_as_eager, fuse, fused
from tests.passes.spellings import llama, rows, weights
from tests.passes.spellings_more import silu
from tests.passes.tracing import trace

HIDDEN, OUT = 128, 64
EPS = 1e-5


def choose_scale(x: Tensor, *, eps: float | None = EPS) -> Tensor:
    """One symmetric scale a row, from -127 to 127. float16 is widened at last, bfloat16 is not."""
    least, most = torch.amin(x, dim=[1]), torch.amax(x, dim=[1])
    negative = torch.min(least, torch.zeros_like(least))
    positive = torch.max(most, torch.zeros_like(most))
    scale = torch.max(-negative, positive) / (float(127 - -127) / 2)
    scale = scale if eps is None else torch.clamp(scale, min=eps)
    return scale.to(torch.float32 if x.dtype == torch.float16 else x.dtype)


def int8_linear(x: Tensor, weight: Tensor, weight_scale: Tensor, *, eps: float | None = EPS) -> Tensor:
    """x [T, H], weight int8 [N, H], one scale for each of its rows."""
    scale = choose_scale(x, eps=eps).view(-1, 1)
    codes = torch.clamp(torch.round(x * (1.0 / scale)), -127, 127).to(torch.int8)
    product = codes.to(torch.int32) @ weight.to(torch.int32).t()
    return (product.to(scale.dtype) * scale * weight_scale.to(scale.dtype)).to(x.dtype)


def given(count: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (OUT, HIDDEN), generator=generator, dtype=torch.int8)
    x = torch.randn(count, HIDDEN, generator=generator).to(dtype)
    x[0] = 0.0
    return x, weights(HIDDEN, dtype), codes, torch.rand(OUT, generator=generator)


def behind_norm(x: Tensor, w: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    return int8_linear(llama(x, w), codes, scale)


def behind_activation(x: Tensor, w: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    return int8_linear(silu(x, x * w), codes, scale)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [behind_norm, behind_activation])
def test_the_quantisation_is_fused_bit_for_bit(
    function: Callable[..., Any], dtype: torch.dtype, dynamic: bool
) -> None:
    gm, found = fuse(function, *given(6, dtype), dynamic=dynamic)
    assert fused(found) == 1
    assert not any(outcome.near_misses for outcome in found.values())
    assert any(name.endswith("_quant_dynamic.default") for name in targets(gm))
    assert_as_eager(gm, function, *given(9 if dynamic else 6, dtype))


def test_a_scale_without_a_floor_is_named() -> None:
    def unbounded(x: Tensor, w: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        return int8_linear(llama(x, w), codes, scale, eps=None)

    gm = trace(unbounded, *given(6, torch.float32))
    (miss,) = run_pass(raise_ir.PASS, gm).near_misses
    assert (miss.reason, "0 or -0" in miss.detail) == (Reason.OTHER_SPELLING, True)
    assert_as_eager(gm, unbounded, *given(6, torch.float32))


def test_rows_of_one_sign_have_the_largest_absolute_value_too() -> None:
    x = rows(4, HIDDEN, torch.float32).abs()
    for one in (x, -x):
        torch.testing.assert_close(choose_scale(one)[0], one[0].abs().amax() / 127, rtol=0, atol=0)
