"""Lowered for a GPU that is not here: fused operators become launches, the rest is spelled out."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

from fuse_cache.passes import act_quant, lower_ir, norm_quant, raise_ir
from fuse_cache.passes.base import Outcome, Reason, Setting
from tests.passes.graphs import run_pass, targets
from tests.passes.spellings import divide_wide, llama, rows, weights
from tests.passes.spellings_dynamic import DYNAMIC
from tests.passes.spellings_more import ADD_NORMS, GATES
from tests.passes.spellings_nvfp4 import NVFP4
from tests.passes.test_spellings import BLOCKS
from tests.passes.test_spellings import arguments as block_arguments
from tests.passes.tracing import trace

SM_90 = Setting("sm_90")
LAUNCH = "triton_kernel_wrapper_functional"


def lowered(
    function: Any, *args: Tensor, setting: Setting = SM_90, dynamic: bool = False, device: str = "meta"
) -> tuple[fx.GraphModule, Outcome]:
    """Return the lowered graph, and what fusions and lowering did."""
    gm = trace(function, *args, dynamic_rows=dynamic, device=device)
    run_pass(raise_ir.PASS, gm, setting)
    total = Outcome()
    for one in (norm_quant.PASS, act_quant.PASS):
        outcome = run_pass(one, gm, setting)
        total.matches += outcome.matches
        total.near_misses += outcome.near_misses
    total.near_misses += run_pass(lower_ir.PASS, gm, setting).near_misses
    return gm, total


def launches(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if str(node.target) == LAUNCH]


def given(size: int = 256) -> tuple[Tensor, ...]:
    return rows(7, size, torch.bfloat16), weights(size, torch.bfloat16), torch.tensor(0.0371)


@pytest.mark.parametrize("name", list(BLOCKS)[::5])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_fused_operator_becomes_one_launch(name: str, dynamic: bool) -> None:
    check(name, dynamic)


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_every_spelling_becomes_one_launch(name: str, dynamic: bool) -> None:
    check(name, dynamic)


def check(name: str, dynamic: bool) -> None:
    _, block = BLOCKS[name]
    operands = block_arguments(7, torch.bfloat16)
    gm, outcome = lowered(block, *operands, dynamic=dynamic)
    assert (outcome.matches, outcome.near_misses) == (1, [])
    assert not any("fuse_cache" in target for target in targets(gm))
    (launch,) = launches(gm)
    written, kwargs = launch.kwargs["tensors_to_clone"], launch.kwargs["kwargs"]
    assert isinstance(written, (list, tuple))
    assert isinstance(kwargs, dict)
    # What is written was made for it, and is read through the launch alone.
    assert {user.args[1] for user in launch.users} <= set(written)
    for place in written:
        made = kwargs[place]
        assert "empty" in str(made.target)
        assert all(user is launch for user in made.users)
    assert all(user.target is operator.getitem for user in launch.users)
    outputs = [node.meta["val"] for node in gm.graph.output_node().all_input_nodes]
    for found, expected in zip(outputs, block(*operands), strict=True):
        assert (found.dtype, found.dim()) == (expected.dtype, expected.dim())
        if not dynamic:
            assert (list(found.shape), list(found.stride())) == (
                list(expected.shape),
                list(expected.stride()),
            )


def test_the_launch_holds_kernel_grid_and_constants() -> None:
    gm, _ = lowered(lambda x, w, s: divide_wide(llama(x, w), s), *given(), dynamic=True)
    (launch,) = launches(gm)
    index: Any = launch.kwargs["kernel_idx"]
    grid: Any = launch.kwargs["grid"]
    kernel: Any = kernel_side_table.get_kernel(index)
    assert kernel.fn.__name__ == "rms_norm_kernel"
    assert [config.num_warps for config in kernel.configs] == [1]
    assert isinstance(grid[0][0].meta["val"], torch.SymInt)  # The launch is as large as there are tokens.
    kwargs: Any = launch.kwargs["kwargs"]
    assert (kwargs["H"], kwargs["EPS"], kwargs["NORM_DTYPE"]) == (256, 1e-6, "bfloat16")
    assert set(kernel.fn.arg_names) == set(kwargs)


def test_layers_share_one_kernel() -> None:
    def model(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        for _ in range(3):
            x = divide_wide(llama(x, weight), scale).to(x.dtype)
        return x

    gm, outcome = lowered(model, *given())
    assert outcome.matches == 3
    assert len({node.kwargs["kernel_idx"] for node in launches(gm)}) == 1


@pytest.mark.parametrize("form", ["norm", "sum", "gate"])
def test_what_is_not_fused_is_left_to_inductor(form: str) -> None:
    def block(x: Tensor, weight: Tensor, scale: Tensor) -> object:
        if form == "norm":
            return llama(x, weight)
        return ADD_NORMS["add_llama"](x, x.sin(), weight) if form == "sum" else GATES["silu"](x, x.sin())

    gm, outcome = lowered(block, *given())
    assert outcome.matches == 0
    assert launches(gm) == []
    assert not any("fuse_cache" in target for target in targets(gm))


def rare_format(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    codes = (llama(x, weight).float() / scale).clamp(-57344, 57344)
    return codes.to(torch.float8_e5m2fnuz)


@pytest.mark.parametrize(
    ("setting", "reason", "words"),
    [
        (Setting("sm_75"), Reason.OP_MISSING, "there are no kernels for sm_75"),
        (SM_90, Reason.OP_MISSING, "sm_90 has no kernel for float8_e5m2fnuz"),
    ],
)
def test_a_fusion_without_a_kernel_leaves_the_graph_alone_and_says_why(
    setting: Setting, reason: Reason, words: str
) -> None:
    gm, outcome = lowered(rare_format, *given(), setting=setting)
    assert outcome.matches == 0
    assert launches(gm) == []
    # The quantisation and the norm: one reason each.
    assert [miss.reason for miss in outcome.near_misses] == [reason, reason]
    assert words in outcome.near_misses[0].detail


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x, w, s: divide_wide(llama(x.t().contiguous().t(), w), s), "neighbours in memory"),
        (lambda x, w, s: NVFP4["narrow"](llama(x, w), torch.tensor(0.5)), None),
        (lambda x, w, s: DYNAMIC["group_row"](llama(x, w)), None),
    ],
)
def test_memory_that_a_kernel_cannot_address_is_an_obstacle(function: Any, words: str | None) -> None:
    gm, outcome = lowered(function, *given())
    assert bool(outcome.matches) == (words is None)
    assert len(launches(gm)) == outcome.matches
    assert all(words is not None and words in miss.detail for miss in outcome.near_misses[:1])


def test_values_that_are_elsewhere_have_no_kernel() -> None:
    gm, outcome = lowered(lambda x, w, s: divide_wide(llama(x, w), s), *given(), device="cpu")
    assert launches(gm) == []
    assert outcome.near_misses[0].reason == Reason.TARGET
    assert "on cpu" in outcome.near_misses[0].detail
