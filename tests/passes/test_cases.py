"""Bug reports that people doing this job filed, on the passes: the numbers of each case is its name's end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx.experimental._config as fx_config
import torch.nn.functional as F
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fuse_cache.passes.base import Reason
from tests.passes.pipeline import Function, assert_as_eager, fuse, fuse_graph, fused, given
from tests.passes.spellings import divide_wide, gemma, llama, olmo
from tests.passes.spellings_dynamic import group_row, int8_divided, per_token
from tests.passes.spellings_more import add_llama, silu

BF16 = torch.bfloat16


def scale_is_merely_late(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    normed, total = add_llama(x, y, w)
    other = total.relu()
    return divide_wide(normed, s * 2.0), other


def scale_is_from_a_reader_of_the_sum(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    normed, total = add_llama(x, y, w)
    return divide_wide(normed, s + total.relu().float().mean()), total


@pytest.mark.parametrize(
    ("function", "matches"), [(scale_is_merely_late, 1), (scale_is_from_a_reader_of_the_sum, 0)]
)
def test_a_late_scale_is_moved_up_unless_it_needs_the_sum_case_4(function: Function, matches: int) -> None:
    gm, found = fuse(function, *given())  # Each pass is verified: nothing is used before it is defined.
    assert fused(found) == matches
    if not matches:
        assert {miss.reason for miss in found["norm_quant"].near_misses} == {Reason.EXTRA_USER}
    assert_as_eager(gm, function, *given())


@pytest.mark.parametrize("added", [False, True], ids=["plain", "add"])
@pytest.mark.parametrize("static", [True, False], ids=["static", "per-token"])
def test_a_wide_weight_is_not_rounded_in_any_pattern_case_9(static: bool, added: bool) -> None:
    # The forms with an all-reduce in front come with that fusion.
    def block(x: Tensor, residual: Tensor, w: Tensor, s: Tensor) -> Any:
        normed = gemma(x + residual if added else x, w)
        return divide_wide(normed, s) if static else per_token(normed)

    x = torch.tensor([[3.0, 1.0, 1.0, 1.0]], dtype=BF16)
    residual = torch.tensor([[1.0, 0.5, 0.5, 0.5]], dtype=BF16)
    arguments = (
        x - residual if added else x,
        residual,
        torch.full((4,), 0.05).to(BF16),
        torch.tensor(1 / 64),
    )
    gm, found = fuse(block, *arguments)
    assert fused(found) == 1
    codes, *scales = assert_as_eager(gm, block, *arguments)
    values = codes.float() * scales[0] if scales else codes.float()
    expected = [1.8203125, 0.60546875, 0.60546875, 0.60546875] if scales else [120.0, 40.0, 40.0, 40.0]
    torch.testing.assert_close(values, torch.tensor([expected]), rtol=0.07 if scales else 0, atol=0)


def norm_static(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return divide_wide(llama(x, w), s)


def norm_token(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return per_token(llama(x, w))


def norm_group(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return group_row(llama(x, w))


def norm_int8(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return int8_divided(llama(x, w))


def sum_static(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    normed, total = add_llama(x, y, w)
    return divide_wide(normed, s), total


def residual_behind_a_matmul(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    total = x @ torch.outer(w, w) + y
    return (*per_token(llama(total, w)), total)


def gate_static(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return divide_wide(silu(x, y), s)


def gate_group(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return group_row(silu(x, y))


EVERY = (
    norm_static,
    norm_token,
    norm_group,
    norm_int8,
    sum_static,
    residual_behind_a_matmul,
    gate_static,
    gate_group,
)


def size_oblivious() -> Any:
    """Keep a size of 1 from being special, as clients and workers do (DECISIONS/0003)."""
    return fx_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]  # added at run time


def traced_with_hint(function: Function, hint: int) -> fx.GraphModule:
    """Trace with a symbolic number of rows whose hint may be 1, as Dynamo does for a marked dimension."""
    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    x, _, w, s = given(hint)
    kinds: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC]
    )
    static: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.STATIC])
    with size_oblivious():
        first = mode.from_tensor(x, symbolic_context=kinds)
        weight = mode.from_tensor(w, symbolic_context=static)
        fakes = (first, first.new_empty(first.shape), weight, mode.from_tensor(s))
        gm = make_fx(lambda *a: tuple(torch.utils._pytree.tree_leaves(function(*a))), select_decomp_table())(
            *fakes
        )
    gm.meta["shape_env"] = shape_env
    return gm


@pytest.mark.parametrize("function", EVERY)
def test_every_fusion_counts_alike_for_all_numbers_of_rows_case_32(function: Function) -> None:
    counts = {}
    for name, count, dynamic in (("5", 5, False), ("1", 1, False), ("symbolic", 5, True)):
        gm, found = fuse(function, *given(count), dynamic=dynamic)
        counts[name] = fused(found)
        assert_as_eager(gm, function, *given(count))
    gm = traced_with_hint(function, 1)
    with size_oblivious():
        counts["symbolic, hint 1"] = fused(fuse_graph(gm))
    assert counts == dict.fromkeys(counts, 1)


LIBRARY = torch.library.Library("fuse_cache_test_cases", "DEF")  # type: ignore[no-untyped-call]  # torch has no types here
LIBRARY.define("norm(Tensor x, Tensor weight, float eps, Tensor? variance=None) -> Tensor")  # type: ignore[no-untyped-call]  # as above
LIBRARY.impl("norm", lambda x, w, eps, variance=None: olmo(x, w), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # as above
CUSTOM = torch.ops.fuse_cache_test_cases.norm


def squared_by_product(x: Tensor, w: Tensor) -> Tensor:
    h = x.to(torch.float32)
    return w * (h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@pytest.mark.parametrize(
    ("norm", "words"),
    [
        (lambda x, w: CUSTOM(x, w, 1e-5), "fuse_cache_test_cases.norm"),
        (lambda x, w: CUSTOM(x, w, 1e-5, None), "fuse_cache_test_cases.norm"),
        (llama, None),  # pow(2).mean, widened up front, the weight behind the cast
        (squared_by_product, None),
        (olmo, None),  # the weight before the cast
        (lambda x, w: F.rms_norm(x, (x.shape[-1],), w, 1e-6), None),
    ],
    ids=["custom", "custom-with-None", "power", "product", "weight-first", "functional"],
)
def test_each_spelling_of_a_norm_is_fused_or_named_case_34(norm: Function, words: str | None) -> None:
    def block(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
        return divide_wide(norm(x, w), s)

    gm, found = fuse(block, *given())
    assert fused(found) == (words is None)
    details = [miss.detail for miss in found["norm_quant"].near_misses]
    assert len(details) == (words is not None)
    assert all(words is not None and words in detail for detail in details)
    assert_as_eager(gm, block, *given())


def norm_is_returned(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    normed = llama(x, w)
    return divide_wide(normed, s), normed


def norm_feeds_a_router(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    normed = llama(x, w)
    return (*per_token(normed), normed @ normed.t())


def two_scales(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    normed = llama(x, w)
    return divide_wide(normed, s), divide_wide(normed, s * 3)


def static_scale_is_read(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return divide_wide(llama(x, w), s), s * 2


def dynamic_scale_is_read(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    codes, scale = per_token(llama(x, w))
    return codes, scale, scale.relu().sum(), codes.float() * scale


@pytest.mark.parametrize(
    "function",
    [norm_is_returned, norm_feeds_a_router, two_scales, static_scale_is_read, dynamic_scale_is_read],
)
def test_what_others_read_is_there_as_if_unfused_case_35(function: Function) -> None:
    gm, found = fuse(function, *given())
    assert fused(found) == 1
    assert_as_eager(gm, function, *given())
