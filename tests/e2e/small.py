"""Graphs of a few operators: what a host asks for them, and what an artifact of theirs computes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fuse_cache.client.ambient import capture_ambient
from fuse_cache.client.graph import Encoded
from fuse_cache.client.loader import load
from fuse_cache.client.verify import Artifact, Want
from fuse_cache.proto.inductor_options import check_options
from fuse_cache.proto.pass_config import PassConfig, PassContext
from fuse_cache.proto.request import Range, RequestFields
from tests.captured import copied, encode_call
from tests.compiled import TARGET


@dataclass(frozen=True)
class Small:
    """One graph, the arguments it was traced with, and what eager makes of them."""

    encoded: Encoded
    arguments: tuple[Any, ...]
    expected: Tensor

    def want(self, *, inductor: Mapping[str, object] | None = None) -> Want:
        """Return what a host asks for, as the backend does."""
        resolved = PassConfig().resolve(PassContext(target=TARGET))
        with torch.no_grad():
            ambient = capture_ambient()
        fields = RequestFields(
            graph_digest=self.encoded.digest,
            pass_config=resolved.encode(),
            target=TARGET,
            range=Range(),
            inductor_options=check_options(inductor or {}),
            ambient=ambient,
        )
        return Want.of(fields, self.encoded.data, resolved)

    def difference(self, artifact: Artifact) -> float:
        """Load the artifact, run it, and return how far it is from eager."""
        loaded = load(artifact.content, artifact.manifest, graph=self.encoded.graph)
        with torch.no_grad():
            (got,) = loaded(*copied(self.arguments))
        assert got.shape == self.expected.shape
        return float((got - self.expected).abs().max())


def small(function: Callable[..., Tensor], *args: Tensor) -> Small:
    """Trace a call."""
    found = encode_call(function, *args)
    with torch.no_grad():
        expected = function(*(arg.clone() for arg in args))
    return Small(found.encoded, found.captured.arguments, expected)


@functools.cache
def silu_graph(number: int) -> Small:
    """Return `silu(x) * number + number` for x of 8 x (4096 number): six of these are one case."""

    def function(x: Tensor) -> Tensor:
        return functional.silu(x) * number + number

    generator = torch.Generator().manual_seed(number)
    return small(function, torch.randn(8, 4096 * number, generator=generator))
