"""Which graphs keep their own rounding: a fact of graph, target and the user's option, not of the passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor

from fuse_cache.passes.manager import PassManager
from fuse_cache.passes.rounding import DIVISION, OPTION, quantises, rounding_patches
from fuse_cache.proto.pass_config import PassConfig, PassContext, Range
from tests.passes.graphs import aot_graph
from tests.passes.spellings import divide, llama, rows, weights


def norm_only(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return llama(x, weight) * scale


def norm_fp8(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return divide(llama(x, weight), scale)


def norm_int8(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return (llama(x, weight) / scale).round().clamp(-128, 127).to(torch.int8)


def codes_inside_only(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return norm_fp8(x, weight, scale).float() * scale


ARGUMENTS = rows(6, 64, torch.bfloat16), weights(64, torch.bfloat16), torch.tensor(0.1)


@pytest.mark.parametrize(
    ("function", "expected"),
    [(norm_only, False), (norm_fp8, True), (norm_int8, True), (codes_inside_only, True)],
)
def test_a_graph_quantises_if_any_value_of_it_is_codes(function: Callable[..., Any], expected: bool) -> None:
    assert quantises(aot_graph(function, *ARGUMENTS)) is expected


def test_codes_that_are_only_given_count_too() -> None:
    gm = aot_graph(lambda x, weight: x * weight.to(x.dtype), ARGUMENTS[0], torch.ones(64, dtype=torch.int8))
    assert quantises(gm)


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("options", "target", "expected"),
    [({}, "cpu-avx2", True), ({OPTION: False}, "cpu-avx2", False), ({}, "sm_90", True), ({}, "gfx942", None)],
)
def test_the_passes_have_no_say_and_the_user_has_the_last_word(
    level: str, fused: bool, options: dict[str, object], target: str, expected: bool | None
) -> None:
    gm = aot_graph(norm_fp8, *ARGUMENTS)
    resolved = PassConfig(fuse_norm_quant=fused).resolve(PassContext(target=target), level)
    patches = PassManager(resolved, Range(), target).inductor_patches(gm, options)
    assert patches.get(OPTION) is expected


def test_on_a_gpu_a_scale_divides_as_eagerly() -> None:
    known = inductor_config.get_config_copy()
    for family, divides in (("sm", True), ("cpu", None), ("gfx", None)):
        patches = rounding_patches(None, family)
        assert patches.get(DIVISION) is divides
        assert set(patches) <= set(known)
    assert rounding_patches(aot_graph(norm_only, *ARGUMENTS), "sm") == {}
