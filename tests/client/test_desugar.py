"""Tensors made of tensors: the graph goes at ATen level, and the call is as before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.testing._internal import two_tensor

from fuse_cache.client.desugar import desugar_to_aten
from fuse_cache.client.graph import Encoded, encode_graph, needs_desugaring
from fuse_cache.proto.graph import Level
from fuse_cache.proto.graph_codec import decode
from fuse_cache.proto.request import Range
from fuse_cache.server.worker.rebuild import rebuild

TwoTensor: Any = two_tensor.TwoTensor  # Any: torch has not typed it.


def _run(function: Any, *args: Any) -> tuple[Any, list[Encoded]]:
    """Compile `function` with a backend that desugars, encodes, and runs what a worker rebuilds."""
    encoded: list[Encoded] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        assert needs_desugaring(gm)

        def compile_flat(flat: torch.fx.GraphModule, flat_inputs: Any) -> Any:
            assert not needs_desugaring(flat)
            encoded.append(encode_graph(flat, flat_inputs))
            return rebuild(decode(encoded[-1].data), Range()).gm

        return desugar_to_aten(gm, inputs, compile_flat)

    torch._dynamo.reset()
    with torch.no_grad():
        compiled: Any = torch.compile(function, backend=backend, fullgraph=True)
        return compiled(*args), encoded


def test_a_tensor_subclass_is_taken_apart_and_put_together() -> None:
    def forward(x: Tensor, w: Tensor, counter: Tensor) -> Tensor:
        counter.add_(1)
        return torch.nn.functional.silu(x @ w)

    x, w = TwoTensor(torch.randn(4, 8), torch.randn(4, 8)), torch.randn(8, 8)
    counter = torch.zeros(3)
    got, (encoded,) = _run(forward, x, w, counter)
    want: Any = forward(x, w, torch.zeros(3))
    assert isinstance(got, TwoTensor)
    assert torch.equal(got.a, want.a)
    assert torch.equal(got.b, want.b)
    assert counter.tolist() == [1, 1, 1]
    assert encoded.graph.level is Level.ATEN
    assert len(encoded.graph.inputs) == 4
    assert {node.target for node in encoded.graph.nodes} >= {"aten::mm.default", "aten::copy_.default"}


def test_equal_programs_over_subclasses_have_equal_bytes() -> None:
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x) @ w

    def renamed(a: Tensor, b: Tensor) -> Tensor:
        return torch.relu(a) @ b

    w = torch.randn(8, 8)
    digests = {
        _run(function, TwoTensor(torch.randn(4, 8), torch.randn(4, 8)), w)[1][0].digest
        for function in (forward, renamed)
    }
    assert len(digests) == 1
