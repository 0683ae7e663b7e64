"""Fused graphs in artifacts, built as a worker builds and loaded as a host loads: eager's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fuse_cache.client.loader import load
from tests.captured import copied
from tests.compiled import Compiled, compile_captured
from tests.models import capture
from tests.passes.graphs import same_results
from tests.passes.spellings import divide_wide, llama, rows, weights
from tests.passes.spellings_dynamic import group_power, int8_multiplied, per_token
from tests.passes.spellings_more import add_llama, add_wide, gelu, gelu_tanh, silu, swish
from tests.passes.test_cases_numbers import edges_static, edges_token

# Torch's own, when Inductor is first imported.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.skipif(
        torch.__version__ < "2.13", reason="Inductor drops casts inside a loop on 2.11 whatever it is told"
    ),
]
BF16 = torch.bfloat16
WIDE, NARROW = 4096, 256
ROWS = 6


def two_layers(
    add_norm: Callable[..., tuple[Tensor, Tensor]], x: Tensor, residual: Tensor, w: Tensor, s: Tensor
) -> tuple[Tensor, ...]:
    """Two additions with their norms, the second on what the first one's codes stand for."""
    normed, total = add_norm(x, residual, w)
    codes = divide_wide(normed, s)
    again, last = add_norm((codes.float() * s).to(BF16), total, w)
    return (codes, *per_token(again), last)


def program(
    x: Tensor, residual: Tensor, w: Tensor, gate: Tensor, up: Tensor, edges: Tensor, small: Tensor, s: Tensor
) -> tuple[Tensor, ...]:
    """One graph of all that is compared: x and residual [T, 4096], gate and up [T, 256]."""
    return (
        *two_layers(add_llama, x, residual, w, s),
        *two_layers(add_wide, x, residual, w, s),
        divide_wide(silu(gate, up), s),
        *per_token(gelu_tanh(gate, up)),
        # Finite ones: in INT8, a NaN is whatever the cast makes of it.
        *int8_multiplied(swish(x[:, :NARROW], residual[:, :NARROW])),
        *group_power(gelu(gate, up)),
        edges_static(edges * 1.0, s / s),
        *edges_token(small, s),
        divide_wide(llama(small.to(BF16), w[:4]), s),
    )


def given(count: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(count)
    x, residual = (torch.randn(count, WIDE, generator=generator).to(BF16) for _ in range(2))
    gate, up = (rows(count, NARROW, BF16, seed=seed) for seed in (count, count + 1))
    edges = torch.tensor([[448.0, 449, 464, 465, 500, 1e4, float("inf"), float("-inf"), float("nan")]])
    small = torch.tensor([[0.0, 0, 0, 0], [1, -2, 3, -4], [1e-9, 0, 0, 0]])
    return x, residual, weights(WIDE, BF16), gate, up, edges, small, torch.tensor(0.0371)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """The program's artifact for any number of rows."""
    arguments = given(ROWS)
    for place in (0, 1, 3, 4):
        torch._dynamo.mark_dynamic(arguments[place], 0)
    return compile_captured(capture(program, *arguments), tmp_path_factory.mktemp("compiled"))


def test_everything_is_fused_in_the_artifact(artifact: Compiled) -> None:
    matches: dict[str, Any] = {row["name"]: row["matches"] for row in artifact.built.passes}
    assert (matches["norm_quant"], matches["act_quant"]) == (5, 4)
    # The two that quantise inputs have nothing to be fused with.
    assert [miss["reason"] for miss in artifact.built.near_misses] == ["no_partner", "no_partner"]


@pytest.mark.parametrize("count", [ROWS, 1, 17])
def test_a_compiled_fusion_has_eagers_bits_at_any_number_of_rows_cases_8_and_38(
    artifact: Compiled, count: int
) -> None:
    arguments = given(count)
    with torch.no_grad():
        found = load(artifact.built.content)(*_in_order(artifact, arguments))
    for place, (one, other) in enumerate(zip(found, program(*arguments), strict=True)):
        assert same_results(one, other), place


def _in_order(artifact: Compiled, arguments: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Return the arguments as the graph takes them: by first use, sizes beside them."""
    traced = artifact.captured.arguments
    before = given(ROWS)
    order: list[Any] = []
    for one in traced:
        if not isinstance(one, Tensor):
            order.append(arguments[0].shape[0])
            continue
        place = next(i for i, other in enumerate(before) if one.shape == other.shape and _equal(one, other))
        order.append(arguments[place])
    return tuple(copied(tuple(order)))


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def test_card_n1_is_so_eagerly_too() -> None:
    x = torch.ones(1, 4, dtype=BF16)
    residual = torch.tensor([[2**-8, 2**-8, 2**-8, 2.0]], dtype=BF16)
    weight = torch.ones(4, dtype=BF16)
    for add_norm, last in ((add_wide, 1.7265625), (add_llama, 1.734375)):
        y, total = add_norm(x, residual, weight)
        assert (y[0, 3].item(), total.tolist()) == (last, [[1.0, 1.0, 1.0, 3.0]])
