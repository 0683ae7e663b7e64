"""On a machine with a GPU: the graph of a model with real CUDA tensors is that of the same model made of fake
ones, and that of the CPU with the device's name exchanged.

`python tests/gpu/digests.py` prints a JSON line for each model.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fuse_cache.client.graph import encode_graph
from fuse_cache.proto import graph_codec
from tests.gpu.build_contents import on_cuda
from tests.models import Captured, Kind, build_model, capture, example_inputs


def digest(captured: Captured, *, moved: bool = False) -> str:
    """Return the digest of a captured graph."""
    graph = encode_graph(captured.gm).graph
    return graph_codec.graph_digest(graph_codec.encode(on_cuda(graph) if moved else graph)).hex()


def without_weights(model: torch.nn.Module) -> None:
    """Replace every tensor of `model` by a fake one on a GPU. Under a fake mode."""

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")

    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module._parameters[name] = torch.nn.Parameter(fake(parameter), parameter.requires_grad)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = fake(buffer)


def main() -> None:
    """Compare the three for each model."""
    cells: list[tuple[str, Kind]] = [("llama", "static"), ("llama", "dynamic"), ("qwen3", "dynamic")]
    for name, kind in cells:
        digests: dict[str, Any] = {}
        cpu = build_model(name, torch.bfloat16)
        digests["cpu"] = digest(capture(cpu, **example_inputs(cpu, kind)), moved=True)
        real = cpu.cuda()
        digests["real"] = digest(capture(real, **example_inputs(real, kind)))
        fake = build_model(name, torch.bfloat16)
        with FakeTensorMode(allow_non_fake_inputs=True):
            without_weights(fake)
            inputs = example_inputs(fake, kind)
        try:
            digests["fake"] = digest(capture(fake, **inputs))
        except Exception as error:  # Told, like a difference.
            digests["fake"] = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps({"model": name, "kind": kind, "equal": len(set(digests.values())) == 1, **digests}))


if __name__ == "__main__":
    main()
