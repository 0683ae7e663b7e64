"""Sizes of 1: in the graph of all sizes where the program treats them alike, and a graph of their own where
it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from fuse_cache.client.errors import OptionError
from fuse_cache.client.tracing import _is_retrace, trace_size_obliviously
from tests.models import build_model, example_inputs


@pytest.fixture
def traced() -> Iterator[list[GraphModule]]:
    """The graphs that a backend of the test's own was given."""
    torch._dynamo.reset()
    yield []
    torch._dynamo.reset()


def _compiled(function: Any, traced: list[GraphModule]) -> Callable[..., Any]:
    trace_size_obliviously()

    def keep(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        trace_size_obliviously()
        traced.append(gm)
        return gm.forward

    compiled: Callable[..., Any] = torch.compile(function, backend=keep, fullgraph=True)
    return compiled


@torch.no_grad()
def test_one_graph_serves_size_one_where_the_program_treats_sizes_alike(traced: list[GraphModule]) -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    for first in (8, 1):
        torch._dynamo.reset()
        traced.clear()
        compiled = _compiled(double, traced)
        for size in (first, 1, 5, 8):
            x = torch.randn(size, 3)
            if size == first:
                torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(compiled(x), x * 2)
        assert len(traced) == 1


@torch.no_grad()
def test_a_model_that_asks_for_size_one_gets_a_graph_for_it_and_no_error(traced: list[GraphModule]) -> None:
    model = build_model("llama")
    compiled = _compiled(model, traced)
    for batch, length in ((2, 8), (3, 5), (1, 1), (3, 32)):
        kind: Any = "dynamic" if not traced else "static"
        inputs = example_inputs(model, kind, batch=batch, length=length)
        torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits)
    assert len(traced) == 2


def assigned(x: Tensor) -> Tensor:
    padded = x.new_zeros(64, 3)
    padded[: x.shape[0]] = x
    return padded


@torch.no_grad()
def test_what_is_assigned_to_a_slice_of_any_length_is_traced_where_the_user_says_that_torch_cannot(
    traced: list[GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.__version__ < "2.13":
        x = torch.randn(8, 3)
        torch._dynamo.mark_dynamic(x, 0)
        with pytest.raises(torch._dynamo.exc.UserError, match=r"Could not guard on .* Eq\(u0, 8\)"):
            _compiled(assigned, traced)(x)
        torch._dynamo.reset()
    monkeypatch.setenv("FUSE_CACHE_SIZE_OBLIVIOUS", "0")
    compiled = _compiled(assigned, traced)
    for size in (8, 5, 1):
        x = torch.randn(size, 3)
        if size == 8:
            torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), assigned(x))
    assert len(traced) == 2  # Size 1 is a constant then.


def test_a_switch_that_is_neither_on_nor_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSE_CACHE_SIZE_OBLIVIOUS", "sometimes")
    with pytest.raises(OptionError, match="use 1 or 0"):
        trace_size_obliviously()


def test_between_traces_the_option_is_on() -> None:
    trace_size_obliviously()
    config: Any = torch.fx.experimental._config
    assert config.backed_size_oblivious is True


@pytest.mark.parametrize(
    ("compile_id", "retrace"),
    [
        ("0/0", False),
        ("3/1", True),
        ("3/0_1", False),
        ("3/2_1", True),
        ("!0/0/1", True),
        ("None", False),
        ("", False),
    ],
)
def test_a_retrace_is_known_by_its_compile_id(compile_id: str, retrace: bool) -> None:
    assert _is_retrace(compile_id) is retrace
