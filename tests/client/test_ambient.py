"""Every global switch that changes what a compiler makes of a graph changes the request (case 19)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fuse_cache.client.ambient import capture_ambient
from fuse_cache.client.unkeyable import UnkeyableGraph
from fuse_cache.proto.request import Ambient


@contextlib.contextmanager
def _set(owner: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _call(function: Callable[[Any], None], value: object, before: object) -> Iterator[None]:
    function(value)
    try:
        yield
    finally:
        function(before)


_MATMUL: Any = torch.backends.cuda.matmul
# Field of Ambient -> a context that changes it, and nothing else but what follows from it.
SWITCHES: dict[str, Callable[[], Any]] = {
    "grad_mode": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default_dtype": lambda: _call(torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic": lambda: _call(torch.use_deterministic_algorithms, True, False),
    "deterministic_fill": lambda: _set(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "float32_matmul_precision": lambda: _call(torch.set_float32_matmul_precision, "medium", "highest"),
    "allow_tf32": lambda: _set(_MATMUL, "allow_tf32", True),
    "allow_bf16_reduced_precision": lambda: _set(_MATMUL, "allow_bf16_reduced_precision_reduction", False),
    "allow_fp16_reduced_precision": lambda: _set(_MATMUL, "allow_fp16_reduced_precision_reduction", False),
    "sdpa_backends": lambda: sdpa_kernel(SDPBackend.MATH),
}


def test_every_field_has_a_switch() -> None:
    assert set(SWITCHES) == {field.name for field in fields(Ambient)}


@pytest.mark.parametrize("field", SWITCHES)
def test_a_switch_changes_its_field(field: str) -> None:
    with torch.no_grad():
        before = capture_ambient()
        with SWITCHES[field]():
            during = capture_ambient()
        assert getattr(during, field) != getattr(before, field)
        assert capture_ambient() == before


def test_a_fresh_process_has_the_defaults() -> None:
    with torch.no_grad():
        assert capture_ambient() == Ambient()


def test_a_state_that_torch_cannot_tell_is_refused() -> None:
    before = _MATMUL.fp32_precision
    _MATMUL.fp32_precision = "tf32"
    try:
        with pytest.raises(UnkeyableGraph, match="set_float32_matmul_precision"):
            capture_ambient()
    finally:
        _MATMUL.fp32_precision = before
