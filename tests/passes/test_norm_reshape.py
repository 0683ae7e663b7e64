"""A reshape between a norm or an activation and its quantisation is moved in front, and the two are fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fuse_cache.passes import act_quant, lower_ir, noop, norm_quant, norm_reshape, raise_ir
from tests.passes.graphs import run_pass, same_results
from tests.passes.spellings import divide_wide, llama, weights
from tests.passes.spellings_dynamic import group_row, per_token
from tests.passes.tracing import run, trace

HIDDEN = 128


def norm(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return per_token(llama(x, w).view(-1, HIDDEN))


def norm_with_two_readers(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    normed = llama(x, w)
    return (*group_row(normed.reshape(-1, HIDDEN)), normed.sum(1))


def three_projections(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    normed = llama(x, w)
    parts = [per_token(normed.view(-1, HIDDEN)) for _ in range(3)]
    return tuple(value for part in parts for value in part)


def sum_and_norm(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    total = x + y
    return divide_wide(llama(total, w).view(-1, HIDDEN), s), total.relu()


def halves(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    gate, up = torch.cat([x, y], -1).chunk(2, -1)
    return per_token((up * torch.nn.functional.silu(gate)).view(-1, HIDDEN))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("function", [norm, norm_with_two_readers, three_projections, sum_and_norm, halves])
def test_a_reshape_in_between_is_moved_in_front(function: Callable[..., Any], dynamic: bool) -> None:
    def given(batch: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(batch)
        x, y = (torch.randn(batch, 5, HIDDEN, generator=generator).to(torch.bfloat16) for _ in range(2))
        return x, y, weights(HIDDEN, torch.bfloat16), torch.tensor(0.0371)

    gm = trace(function, *given(3), dynamic_rows=dynamic)
    guards = len(gm.meta["shape_env"].guards)
    run_pass(raise_ir.PASS, gm)
    run_pass(noop.PASS, gm)
    assert run_pass(norm_reshape.PASS, gm).matches == 1
    outcomes = [run_pass(one, gm) for one in (norm_quant.PASS, act_quant.PASS)]
    assert sum(outcome.matches for outcome in outcomes) == 1
    assert not any(outcome.near_misses for outcome in outcomes)
    run_pass(lower_ir.PASS, gm)
    assert len(gm.meta["shape_env"].guards) == guards
    for batch in (3, 1, 4) if dynamic else (3,):
        for found, expected in zip(run(gm, *given(batch)), function(*given(batch)), strict=True):
            assert same_results(found, expected)


def test_a_reshape_that_changes_the_rows_stays_and_is_named() -> None:
    def heads(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return divide_wide(llama(x, w).view(-1, 2 * HIDDEN), s)

    x = torch.randn(4, 6, HIDDEN).to(torch.bfloat16)
    gm = trace(heads, x, weights(HIDDEN, torch.bfloat16), torch.tensor(0.5))
    run_pass(raise_ir.PASS, gm)
    outcome = run_pass(norm_reshape.PASS, gm)
    assert (outcome.candidates, outcome.matches) == (0, 0)
    assert {miss.reason for miss in run_pass(norm_quant.PASS, gm).near_misses} == {"extra_view"}
