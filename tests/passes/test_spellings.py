"""Every spelling of a norm, a sum before it, a gated activation, a quantisation is fused, bit for bit.

Bit for bit means as eager: the fused operators run by their references, and again spelled out in ATen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fuse_cache.passes import act_quant, lower_ir, norm_quant, raise_ir
from tests.passes.graphs import run_pass, same_results, targets
from tests.passes.spellings import NORMS, QUANTS, Norm, divide_wide, llama, rows, weights
from tests.passes.spellings_dynamic import DYNAMIC
from tests.passes.spellings_more import ADD_NORMS, GATES, AddNorm, Gate
from tests.passes.spellings_nvfp4 import NVFP4
from tests.passes.tracing import run, trace

HIDDEN = 256
Block = Callable[..., tuple[Tensor, ...]]


def _blocks() -> Iterator[tuple[str, str, Block]]:
    """Yield a name, the fused operator and a block for each spelling, beside partners that change in turn.

    A block takes x, another x, a weight and a scale.
    """
    quants = itertools.cycle([*(_static(q) for q in QUANTS.values()), *NVFP4.values(), *DYNAMIC.values()])

    def of_norm(norm: Norm, quant: Any) -> Block:
        return lambda x, y, w, s: _quantised(quant, norm(x, w), s)

    def of_sum(add_norm: AddNorm, quant: Any) -> Block:
        def block(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, ...]:
            norm, total = add_norm(x, y, w)
            return (*_quantised(quant, norm, s), total)

        return block

    def of_gate(gate: Gate, quant: Any) -> Block:
        return lambda x, y, w, s: _quantised(quant, gate(x, y), s)

    for name, norm in NORMS.items():
        yield f"norm-{name}", "rms_norm_quant", of_norm(norm, next(quants))
    for name, add_norm in ADD_NORMS.items():
        yield f"sum-{name}", "fused_add_rms_norm_quant", of_sum(add_norm, next(quants))
    for name, gate in GATES.items():
        yield f"gate-{name}", "act_and_mul_quant", of_gate(gate, next(quants))
    for name, quant in QUANTS.items():
        yield f"static-{name}", "rms_norm_quant_fp8_static", of_norm(llama, _static(quant))
    for name, nvfp4 in NVFP4.items():
        yield f"nvfp4-{name}", "rms_norm_quant_nvfp4", of_norm(llama, nvfp4)
    for name, dynamic in DYNAMIC.items():
        yield f"dynamic-{name}", "rms_norm_quant_dynamic", of_norm(llama, dynamic)


def _static(quant: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    return lambda x, scale: (quant(x, scale),)


def _quantised(quant: Any, x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    result: tuple[Tensor, ...] = quant(x) if quant in DYNAMIC.values() else quant(x, scale)
    return result


BLOCKS = {name: (fused, block) for name, fused, block in _blocks()}


def test_there_are_more_than_forty_spellings() -> None:
    assert len(BLOCKS) > 40


def arguments(count: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    pair = (rows(count, HIDDEN, dtype, seed=seed) for seed in (count, count + 100))
    return (*pair, weights(HIDDEN, dtype), torch.tensor(0.0371))


@pytest.mark.parametrize(
    ("dtype", "dynamic"),
    [(torch.bfloat16, False), (torch.float16, True)],
    ids=["bfloat16-static", "float16-symbolic"],
)
@pytest.mark.parametrize("name", BLOCKS)
def test_every_spelling_is_fused_bit_for_bit(name: str, dtype: torch.dtype, dynamic: bool) -> None:
    check(name, dtype, dynamic=dynamic)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "dynamic"),
    [(torch.bfloat16, True), (torch.float16, False)],
    ids=["bfloat16-symbolic", "float16-static"],
)
@pytest.mark.parametrize("name", BLOCKS)
def test_every_spelling_is_fused_bit_for_bit_the_other_way_round(
    name: str, dtype: torch.dtype, dynamic: bool
) -> None:
    check(name, dtype, dynamic=dynamic)


def check(name: str, dtype: torch.dtype, *, dynamic: bool) -> None:
    fused, block = BLOCKS[name]
    try:
        gm = trace(block, *arguments(7, dtype), dynamic_rows=dynamic)
    except GuardOnDataDependentSymNode:
        assert dynamic
        assert torch.__version__ < "2.13"
        pytest.skip("torch 2.11 cannot trace what is assigned to a slice of any length (DECISIONS/0006)")
    guards = _guards(gm)
    assert run_pass(raise_ir.PASS, gm).near_misses == []
    outcomes = [run_pass(one, gm) for one in (norm_quant.PASS, act_quant.PASS)]
    assert [miss for outcome in outcomes for miss in outcome.near_misses] == []
    assert sum(outcome.matches for outcome in outcomes) == 1
    ours = [target for target in targets(gm) if target.startswith("fuse_cache")]
    assert len(ours) == 1
    assert ours[0].startswith(f"fuse_cache.{fused}")
    counts = (7, 1, 12) if dynamic else (7,)
    for count in counts:
        _compare(gm, block, arguments(count, dtype))
    run_pass(lower_ir.PASS, gm)
    assert not any("fuse_cache" in target for target in targets(gm))
    for count in counts:
        _compare(gm, block, arguments(count, dtype))
    assert _guards(gm) == guards  # No size is burnt in.


def _guards(gm: torch.fx.GraphModule) -> set[str]:
    return {str(guard.expr) for guard in gm.meta["shape_env"].guards}


def _compare(gm: torch.fx.GraphModule, block: Block, given: tuple[Tensor, ...]) -> None:
    for found, expected in zip(run(gm, *given), block(*given), strict=True):
        assert same_results(found, expected)


def test_dead_results_are_not_computed() -> None:
    # The last layer's sum is read by nobody.
    def last(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return divide_wide(ADD_NORMS["add_llama"](x, y, w)[0], s)

    given = arguments(7, torch.bfloat16)
    gm = trace(last, *given)
    run_pass(raise_ir.PASS, gm)
    assert run_pass(norm_quant.PASS, gm).matches == 1
    fused = next(node for node in gm.graph.nodes if "fused_add" in str(node.target))
    assert [user.args[1] for user in fused.users] == [0]
    run_pass(lower_ir.PASS, gm)
    assert same_results(run(gm, *given)[0], last(*given))
