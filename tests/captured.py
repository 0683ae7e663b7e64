"""Graphs that several tests look at: each is traced once in a test run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuse_cache.client.graph import Encoded, encode_graph
from tests.models import Captured, Kind, build_model, capture, example_inputs


@dataclass(frozen=True)
class EncodedCapture:
    """A captured graph and its encoding, made inside the backend as the product does."""

    captured: Captured
    encoded: Encoded


def encode_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> EncodedCapture:
    """Trace one call and encode its graph. An UnkeyableGraph comes out as Dynamo wraps it."""
    made: list[Encoded] = []
    captured = capture(
        function, *args, backend_check=lambda gm, inputs: made.append(encode_graph(gm, inputs)), **kwargs
    )
    return EncodedCapture(captured, made[0])


@functools.cache
def encoded_model(name: str, dtype: torch.dtype, kind: Kind) -> EncodedCapture:
    """Trace and encode one model of the list."""
    model = build_model(name, dtype)
    return encode_call(model, **example_inputs(model, kind))


def copied(arguments: tuple[Any, ...]) -> list[Any]:
    """Return arguments for one more call: graphs write into theirs."""
    return [argument.clone() if isinstance(argument, Tensor) else argument for argument in arguments]
