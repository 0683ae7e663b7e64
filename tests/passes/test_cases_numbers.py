"""Bug reports on the passes' numbers: literals, edges, widths, sizes. A test's name ends in its case."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fuse_cache.passes.base import Outcome, Pass, Setting
from fuse_cache.passes.verify import IllegalGraphError
from tests.passes.graphs import run_pass, targets
from tests.passes.pipeline import Function, assert_as_eager, fuse, fused, given
from tests.passes.spellings import FP8, divide_wide, llama, rows
from tests.passes.spellings_dynamic import FLOOR, MAX, per_token
from tests.passes.test_cases import norm_static, norm_token
from tests.passes.tracing import trace

BF16 = torch.bfloat16


def _norm_over(dim: int) -> Function:
    def block(x: Tensor, w: Tensor) -> Tensor:
        h = x.float()
        return divide_wide((h * torch.rsqrt(h.pow(2).mean(dim, keepdim=True) + 1e-6)) * w, w.max())

    return block


def _gate_of(first: int, second: int) -> Function:
    def block(x: Tensor, w: Tensor) -> Tensor:
        gate, up = torch.split(x, [first, second], -1)
        return per_token(F.silu(gate) * up[:, : gate.shape[-1]])[0] if first <= second else gate

    return block


def _group_of(size: int) -> Function:
    def block(x: Tensor, w: Tensor) -> Tensor:
        groups = llama(x, w).view(x.shape[0], -1, size).float()
        scale = groups.abs().amax(-1, keepdim=True) / MAX
        return (groups / scale).clamp(-MAX, MAX).to(FP8).view(x.shape)

    return block


def _clamped(bound: float) -> Function:
    return lambda x, w: (llama(x, w).float() / w.max()).clamp(-bound, bound).to(FP8)


def _permuted(order: tuple[int, int]) -> Function:
    return lambda x, w: divide_wide(llama(x, w).permute(order), w.max())


def _amax_over(dim: int) -> Function:
    def block(x: Tensor, w: Tensor) -> Tensor:
        h = llama(x, w).float()
        return (h / (h.abs().amax(dim, keepdim=True) / MAX)).clamp(-MAX, MAX).to(FP8)

    return block


def _softmax_over(dim: int) -> Function:
    return lambda x, w: divide_wide(llama(x.softmax(dim), w), w.max())


LITERALS: dict[str, Function] = {
    **{f"mean over {dim}": _norm_over(dim) for dim in (-1, 0, 1)},
    **{f"split {one}, {other}": _gate_of(one, other) for one, other in ((4, 4), (2, 6), (3, 5), (5, 3))},
    **{f"group {size}": _group_of(size) for size in (8, 4, 2, 1)},
    **{f"clamp {bound}": _clamped(bound) for bound in (448.0, 240.0, 447.0, 0.0)},
    **{f"permute {order}": _permuted(order) for order in ((0, 1), (1, 0))},
    **{f"amax over {dim}": _amax_over(dim) for dim in (-1, 0, 1)},
    **{f"softmax over {dim}": _softmax_over(dim) for dim in (-1, 0)},
}


@pytest.mark.parametrize("name", LITERALS)
def test_another_literal_never_changes_a_result_case_37(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    arguments = torch.randn(8, 8, generator=generator), torch.rand(8, generator=generator) + 0.5
    gm, _ = fuse(LITERALS[name], *arguments)
    assert_as_eager(gm, LITERALS[name], *arguments)


def edges_static(x: Tensor, s: Tensor) -> Any:
    return (x / s).clamp(-MAX, MAX).to(FP8)


def edges_token(x: Tensor, s: Tensor) -> Any:
    scale = (x.abs().amax(-1, keepdim=True) / MAX).clamp(min=FLOOR)
    return (x / scale).clamp(-MAX, MAX).to(FP8), scale


def test_codes_at_the_edges_are_those_of_the_card_case_38() -> None:
    x = torch.tensor([[448.0, 449, 464, 465, 500, 1e4, float("inf"), float("-inf"), float("nan")]])
    gm, _ = fuse(edges_static, x, torch.tensor(1.0))
    assert "fuse_cache.quant_fp8_static.default" in targets(gm)
    (codes,) = assert_as_eager(gm, edges_static, x, torch.tensor(1.0))
    assert codes[0, :-1].float().tolist() == [448.0] * 7 + [-448.0]
    assert codes[0, -1].float().isnan()
    small = torch.tensor([[0.0, 0, 0, 0], [1, -2, 3, -4], [1e-9, 0, 0, 0]])
    gm, _ = fuse(edges_token, small, torch.tensor(1.0))
    codes, scales = assert_as_eager(gm, edges_token, small, torch.tensor(1.0))
    assert codes.float().tolist() == [[0.0] * 4, [112.0, -224.0, 320.0, -448.0], [0.0] * 4]
    torch.testing.assert_close(scales[:, 0], torch.tensor([4.3596542e-6, 0.0089285718, 4.3596542e-6]))


@pytest.mark.parametrize("block", [norm_static, norm_token], ids=["static", "per-token"])
def test_a_row_of_zeros_among_three_is_fused_as_it_is_unfused_case_38(block: Function) -> None:
    x, y, w, s = given(3)
    x[1] = 0.0
    gm, found = fuse(block, x, y, w, s)
    assert fused(found) == 1
    codes, *scales = assert_as_eager(gm, block, x, y, w, s)
    assert codes[1].float().tolist() == [0.0] * 128
    assert all((scale > 0).all() for scale in scales)


@pytest.mark.parametrize("order", ["gate first", "up first", "a slice of a wider tensor"])
@pytest.mark.parametrize(("width", "count"), [(w, n) for w in (1, 17, 96, 4096) for n in (1, 17)])
def test_activations_of_any_width_case_45(width: int, count: int, order: str) -> None:
    def block(both: Tensor) -> Any:
        used = both[:, 1 : 1 + 2 * width] if "slice" in order else both
        one, other = used.chunk(2, -1)
        return per_token(F.silu(other) * one if order == "up first" else F.silu(one) * other)

    both = rows(count, 2 * width + 3 * ("slice" in order), BF16, seed=width)
    gm, found = fuse(block, both)
    assert fused(found) == 1
    assert_as_eager(gm, block, both)


def test_a_pass_that_branches_on_a_symbolic_size_is_refused_case_49() -> None:
    def sin_to_cos(graph: fx.Graph, setting: Setting) -> Outcome:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
            if node.meta["val"].shape[0] > 5:
                node.target = torch.ops.aten.cos.default
        return Outcome(matches=1)

    gm = trace(torch.sin, torch.randn(6, 4), dynamic_rows=True)
    with pytest.raises(IllegalGraphError, match=r"pass careless: it assumed s.* > 5 of a symbolic size"):
        run_pass(Pass("careless", sin_to_cos), gm)
    gm = trace(torch.sin, torch.randn(6, 4))
    run_pass(Pass("careless", sin_to_cos), gm)  # A number is no assumption.
