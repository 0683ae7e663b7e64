"""Every near miss is diagnosed: which pass looked, why not, in words; once a candidate, bits untouched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fuse_cache.passes import act_quant, lower_ir, noop, norm_quant, norm_reshape, raise_ir
from fuse_cache.passes.base import Outcome, Pass, Reason, Setting
from fuse_cache.passes.manager import PassManager, StagePass
from fuse_cache.proto.pass_config import PassConfig, PassContext, Range
from tests.passes.graphs import CPU, run_pass, same_results
from tests.passes.near_misses import CASES, Case
from tests.passes.spellings import divide, llama, rows, weights
from tests.passes.tracing import run, trace

HIDDEN = 128
FUSIONS = (norm_quant.PASS, act_quant.PASS)


def given(count: int = 6) -> tuple[Tensor, ...]:
    x, y = (rows(count, HIDDEN, torch.bfloat16, seed=seed) for seed in (count, count + 100))
    return x, y, weights(HIDDEN, torch.bfloat16), torch.tensor(0.0371)


def outcomes(gm: fx.GraphModule, setting: Setting = CPU) -> dict[str, Outcome]:
    """Run the passes up to the fusions; return what those that look for candidates did."""
    passes: tuple[Pass, ...] = (raise_ir.PASS, noop.PASS, norm_reshape.PASS, *FUSIONS)
    found = {one.name: run_pass(one, gm, setting) for one in passes}
    return {
        name: outcome for name, outcome in found.items() if name not in ("eliminate_noops", "norm_reshape")
    }


def check(case: Case, *, dynamic: bool) -> None:
    gm = trace(case.function, *given(), dynamic_rows=dynamic)
    guards = len(gm.meta["shape_env"].guards)
    found = outcomes(gm)
    misses = [miss for outcome in found.values() for miss in outcome.near_misses]
    shown = [(miss.pass_name, str(miss.reason), miss.detail) for miss in misses]
    assert len(misses) == len(case.expected), shown
    for miss, (name, reason, words) in zip(misses, case.expected, strict=True):
        assert (miss.pass_name, miss.reason) == (name, reason), shown
        assert words in miss.detail, shown
    assert len({(miss.pass_name, miss.node) for miss in misses}) == len(misses)
    for outcome in found.values():
        assert outcome.candidates == outcome.matches + len(outcome.near_misses)
    assert sum(found[one.name].matches for one in FUSIONS) == case.matches
    run_pass(lower_ir.PASS, gm)
    assert len(gm.meta["shape_env"].guards) == guards
    for count in (6, 9) if dynamic else (6,):
        expected = case.function(*given(count))
        expected = expected if isinstance(expected, tuple) else (expected,)
        for one, other in zip(run(gm, *given(count)), expected, strict=True):
            assert same_results(one, other)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", CASES)
def test_every_near_miss_has_its_reason_and_keeps_its_bits(name: str, dynamic: bool) -> None:
    case = CASES[name]
    if (case.is_static and dynamic) or (case.is_symbolic and not dynamic):
        return
    check(case, dynamic=dynamic)


def test_there_are_more_than_forty_near_misses() -> None:
    assert len(CASES) > 40


def test_the_five_reasons_that_people_meet_are_diagnosed_by_name() -> None:
    # A cast in between, another spelling, one reshape more, no operator on this hardware, a size burnt in.
    expected = {
        "cast_between": "cast_between",
        "root_is_divided_by": "other_spelling",
        "flattened_to_one_row": "extra_view",
        "attention": "op_missing",
        "always_four_rows": "size_burnt_in",
    }
    named = {}
    for name in expected:
        manager = PassManager(PassConfig().resolve(PassContext(target=CPU.target)), Range(), CPU.target)
        gm = trace(CASES[name].function, *given(), dynamic_rows=True)
        for one in manager.inductor_patches().values():
            if isinstance(one, StagePass):
                one(gm.graph)
        (named[name],) = {str(miss.reason) for miss in manager.near_misses()}
    assert named == expected


def _fused_on(target: str, function: Any, *args: Tensor) -> list[tuple[str, Reason, str]]:
    gm = trace(function, *args, device="meta")
    found = outcomes(gm, Setting(target))
    return [(m.pass_name, m.reason, m.detail) for outcome in found.values() for m in outcome.near_misses]


def test_what_the_hardware_has_no_kernel_for_is_left_alone_and_named() -> None:
    def block(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return divide(llama(x, w), s)

    x, _, w, s = given()
    assert _fused_on("sm_90", block, x, w, s) == []
    (codes, norm) = _fused_on("gfx942", block, x, w, s)
    assert codes == ("norm_quant", Reason.OP_MISSING, "gfx942 has no kernel for float8_e4m3fn")
    assert norm[:2] == ("norm_quant", Reason.OP_MISSING)
    wide = torch.randn(2, 16400).to(torch.bfloat16)
    (codes, _) = _fused_on("sm_90", block, wide, weights(16400, torch.bfloat16), s)
    assert codes[1:] == (Reason.OP_MISSING, "a row of 16400 is longer than 16384")


def test_a_write_between_the_two_is_named() -> None:
    def block(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return divide(llama(x, w), s)

    gm = trace(block, *given())
    run_pass(raise_ir.PASS, gm)
    quant = next(node for node in gm.graph.nodes if "quant_fp8_static" in str(node.target))
    scale = gm.graph.find_nodes(op="placeholder")[3]
    with gm.graph.inserting_before(quant):
        write = gm.graph.call_function(torch.ops.aten.mul_.Tensor, (scale, 2.0))
    write.meta["val"] = scale.meta["val"]
    outcome = run_pass(norm_quant.PASS, gm)
    assert [miss.reason for miss in outcome.near_misses] == [Reason.GUARD, Reason.GUARD]
    assert "a write stands between the norm and the quantisation" in outcome.near_misses[0].detail
    x, y, w, s = given()
    assert same_results(run(gm, x, y, w, s.clone())[0], divide(llama(x, w), s * 2))
