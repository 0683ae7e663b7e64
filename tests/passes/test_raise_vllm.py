"""vLLM's operators are raised and fused with eager's bits, whichever way their writes were functionalised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor

from fuse_cache.passes.base import Reason
from tests.passes import vllm_ops
from tests.passes.graphs import targets
from tests.passes.pipeline import assert_as_eager, fuse, fused
from tests.passes.spellings import rows, weights
from tests.passes.tracing import trace


@pytest.fixture(params=[False, True], ids=["v1", "v2"])
def version(request: pytest.FixtureRequest) -> Iterator[str]:
    with inductor_config.patch(enable_auto_functionalized_v2=request.param):
        yield "auto_functionalized_v2" if request.param else "auto_functionalized"


def given(dtype: torch.dtype) -> tuple[Tensor, ...]:
    x, residual = rows(6, 256, dtype, seed=1), rows(6, 256, dtype, seed=2)
    return x, residual, weights(256, dtype), torch.tensor(0.0371)


def plain(quant: Callable[..., Any]) -> Callable[..., Any]:
    def block(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        return quant(vllm_ops.norm(x, weight), scale)

    return block


def add(quant: Callable[..., Any]) -> Callable[..., Any]:
    def block(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        normed, total = vllm_ops.add_norm(x * 2, residual + 1, weight)
        return *quant(normed, scale), total

    return block


def activation(quant: Callable[..., Any]) -> Callable[..., Any]:
    def block(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        return quant(vllm_ops.silu_and_mul(x), scale)

    return block


@pytest.mark.parametrize(
    ("dtype", "dynamic"), [(torch.bfloat16, False), (torch.float16, True)], ids=["static", "dynamic"]
)
@pytest.mark.parametrize("producer", [plain, add, activation])
@pytest.mark.parametrize("quant", vllm_ops.QUANTS.values(), ids=vllm_ops.QUANTS)
def test_a_producer_and_its_quantisation_are_raised_and_fused_bit_for_bit(
    quant: Callable[..., Any], producer: Callable[..., Any], dtype: torch.dtype, dynamic: bool, version: str
) -> None:
    function = producer(quant)
    gm, found = fuse(function, *given(dtype), dynamic=dynamic)
    assert (found["raise_ir"].candidates, found["raise_ir"].matches) == (2, 2), found["raise_ir"].near_misses
    assert fused(found) == 1
    assert not any("auto_functionalized" in name for name in targets(gm))
    assert_as_eager(gm, function, *given(dtype))


def test_each_reader_of_a_buffer_reads_its_value_at_that_time(version: str) -> None:
    def block(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        x, residual = x * 2, residual + 1
        before = x + 3
        first, total = vllm_ops.add_norm(x, residual, weight)
        codes, between = vllm_ops.static(first, scale)[0], first * 2
        early = total - 1
        vllm_ops.add_norm(x, residual, weight)  # Over the same buffers.
        return codes, before, between, early, x, residual, vllm_ops.static(x, scale)[0]

    gm, found = fuse(block, *given(torch.bfloat16))
    assert found["raise_ir"].matches == 4
    assert fused(found) == 2
    assert not any("auto_functionalized" in name for name in targets(gm))
    assert_as_eager(gm, block, *given(torch.bfloat16))


def test_both_versions_of_functionalisation_are_tested(version: str) -> None:
    gm = trace(plain(vllm_ops.static), *given(torch.bfloat16))
    assert targets(gm).count(version) == 2


def test_the_whole_tensor_as_a_group_is_what_a_scale_means_anyway() -> None:
    def block(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        out = torch.empty_like(x, dtype=vllm_ops.FP8)
        vllm_ops.C.static_scaled_fp8_quant(out, vllm_ops.norm(x, weight), scale, [-1, -1])
        return out

    gm, found = fuse(block, *given(torch.bfloat16))
    assert fused(found) == 1
    assert_as_eager(gm, block, *given(torch.bfloat16))


def test_an_operator_that_reads_what_it_overwrites_keeps_its_bits(version: str) -> None:
    def block(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        x = x * 2
        vllm_ops.C.rms_norm(x, x, weight, 1e-5)
        return vllm_ops.static(x, scale)

    gm, found = fuse(block, *given(torch.bfloat16))
    assert fused(found) == 1
    assert_as_eager(gm, block, *given(torch.bfloat16))


def one_buffer_for_both(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    x = x * 2
    vllm_ops.C.fused_add_rms_norm(x, x, weight, 1e-6)
    return x


def rows_of_a_buffer(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    out = x.new_zeros(12, 256)
    vllm_ops.C.rms_norm(out[:6], x, weight, 1e-6)
    return out


def wide_weight(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return vllm_ops.norm(x, weight.float())


def scale_per_row(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return vllm_ops.static(x, scale.expand(6, 1).contiguous())


def scale_per_block(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    out = torch.empty_like(x, dtype=vllm_ops.FP8)
    vllm_ops.C.static_scaled_fp8_quant(out, x, scale, [1, 128])
    return out


@pytest.mark.parametrize(
    ("function", "reason", "words"),
    [
        (one_buffer_for_both, Reason.GUARD, "two results to one buffer"),
        (wide_weight, Reason.DTYPE, "weight torch.float32"),
        (scale_per_row, Reason.OP_MISSING, "a static scale of shape [6, 1]"),
        (scale_per_block, Reason.OP_MISSING, "group_shape=[1, 128]"),
    ],
)
def test_a_call_that_is_not_what_we_know_is_left_alone_and_says_why(
    function: Callable[..., Any], reason: Reason, words: str
) -> None:
    gm, found = fuse(function, *given(torch.bfloat16))
    (miss,) = found["raise_ir"].near_misses
    assert (found["raise_ir"].matches, miss.reason) == (0, reason)
    assert words in miss.detail
    assert any("auto_functionalized" in name for name in targets(gm))


def test_a_write_to_a_view_is_left_alone_and_says_so() -> None:
    with inductor_config.patch(enable_auto_functionalized_v2=True):
        _, found = fuse(rows_of_a_buffer, *given(torch.bfloat16))
    (miss,) = found["raise_ir"].near_misses
    assert miss.reason is Reason.EXTRA_VIEW


@pytest.mark.parametrize("quant", [vllm_ops.static, vllm_ops.per_token], ids=["static", "per_token"])
def test_a_nan_stays_one_where_vllms_kernels_make_the_largest_code_of_it(quant: Callable[..., Any]) -> None:
    # DECISIONS/0063. The bodies in `vllm_ops` clamp as PyTorch does; this is what the kernels do.
    x, residual, weight, scale = given(torch.bfloat16)
    normed = vllm_ops.norm(x, weight).float()
    is_nan = normed.isnan()
    assert 0 < int(is_nan.sum()) < is_nan.numel()
    largest = torch.tensor(448.0)
    if quant is vllm_ops.per_token:
        amax = normed.abs().nan_to_num(0.0).amax(-1, keepdim=True)  # A maximum that passes NaN over.
        values = normed / (amax / 448.0).clamp_min(1 / (448 * 512))
    else:
        values = normed * scale.reciprocal()
    theirs = torch.fmax(-largest, torch.fmin(values, largest)).to(vllm_ops.FP8).float()

    gm, found = fuse(plain(quant), x, residual, weight, scale)
    assert fused(found) == 1
    codes, *scales = assert_as_eager(gm, plain(quant), x, residual, weight, scale)
    # One NaN makes the scale of its token NaN, and so all of its codes.
    lost = is_nan.any(-1, keepdim=True).expand_as(is_nan) if scales else is_nan
    assert torch.equal(codes.float().isnan(), lost)
    assert torch.equal(codes.float()[~lost], theirs[~lost])
    assert bool((theirs[is_nan] == largest).all())
    assert all(torch.equal(one.isnan(), lost[:, :1]) for one in scales)
