"""The norms of vLLM's own IR are raised and fused with eager's bits, or left with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fuse_cache.passes.base import Reason
from tests.passes.graphs import targets
from tests.passes.pipeline import assert_as_eager, fuse, fused
from tests.passes.spellings import divide_wide, rows, weights

LIBRARY = torch.library.Library("vllm_ir", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch has no types here
EPS = 1e-6


def _norm(wide: Tensor, weight: Tensor | None, epsilon: float, kind: torch.dtype) -> Tensor:
    norm = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return norm.to(kind) if weight is None else (norm.to(weight.dtype) * weight).to(kind)


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    return _norm(x.float(), weight, epsilon, x.dtype)


def _fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    total = x.float() + x_residual.float()
    return _norm(total, weight, epsilon, x.dtype), total.to(x.dtype)


for _schema, _body in (
    ("rms_norm(Tensor x, Tensor? weight, float epsilon, SymInt? variance_size=None) -> Tensor", _rms_norm),
    (
        "fused_add_rms_norm(Tensor x, Tensor x_residual, Tensor? weight, float epsilon, "
        "SymInt? variance_size=None) -> (Tensor, Tensor)",
        _fused_add_rms_norm,
    ),
):
    LIBRARY.define(_schema)  # type: ignore[no-untyped-call]  # as above
    LIBRARY.impl(_schema.split("(")[0], _body, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # as above

IR = torch.ops.vllm_ir


def given(dtype: torch.dtype) -> tuple[Tensor, ...]:
    x, residual = rows(6, 256, dtype, seed=1), rows(6, 256, dtype, seed=2)
    return x, residual, weights(256, dtype), torch.tensor(0.0371)


def plain(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return divide_wide(IR.rms_norm(x, weight, EPS), scale)


def wide_weight(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return divide_wide(IR.rms_norm(x, weight.float() + 1.0, EPS), scale)


def narrow_weight(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return divide_wide(IR.rms_norm(x.float(), weight, EPS), scale)


def without_weight(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return divide_wide(IR.rms_norm(x, None, EPS), scale)


def add(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    norm, total = IR.fused_add_rms_norm(x, residual, weight, EPS)
    return divide_wide(norm, scale), total


def add_wide_residual(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    norm, total = IR.fused_add_rms_norm(x, residual.float(), weight.float(), EPS)
    return divide_wide(norm, scale), total


def add_and_forget(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return divide_wide(IR.fused_add_rms_norm(x, residual, weight, EPS)[0], scale)


@pytest.mark.parametrize(
    ("dtype", "dynamic"), [(torch.bfloat16, False), (torch.float16, True), (torch.float32, False)], ids=str
)
@pytest.mark.parametrize(
    "function", [plain, wide_weight, narrow_weight, without_weight, add, add_wide_residual, add_and_forget]
)
def test_a_norm_of_the_ir_is_raised_and_fused_bit_for_bit(
    function: Callable[..., Any], dtype: torch.dtype, dynamic: bool
) -> None:
    gm, found = fuse(function, *given(dtype), dynamic=dynamic)
    assert (found["raise_ir"].candidates, found["raise_ir"].matches) == (2, 2), found["raise_ir"].near_misses
    assert fused(found) == 1
    assert not any("vllm_ir" in name for name in targets(gm))
    assert_as_eager(gm, function, *given(dtype))


def part_of_the_row(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return IR.rms_norm(x, weight, EPS, 128)


def of_float64(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return IR.rms_norm(x.double(), weight, EPS)


@pytest.mark.parametrize(
    ("function", "reason", "words"),
    [
        (part_of_the_row, Reason.OP_MISSING, "variance_size=128"),
        (of_float64, Reason.DTYPE, "torch.float64"),
    ],
)
def test_a_call_that_is_not_what_we_know_is_left_alone_and_says_why(
    function: Callable[..., Any], reason: Reason, words: str
) -> None:
    gm, found = fuse(function, *given(torch.bfloat16))
    (miss,) = found["raise_ir"].near_misses
    assert (found["raise_ir"].matches, miss.reason) == (0, reason)
    assert words in miss.detail
    assert any("vllm_ir" in name for name in targets(gm))
