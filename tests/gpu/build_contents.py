"""Builds the contents that `load_contents.py` loads: on a machine without a GPU, by a worker's own build.

`python tests/gpu/build_contents.py TARGET FOLDER [NAME ...]`. Graphs are traced on the CPU and then moved to
"cuda", as there is no device to trace on.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuse_cache.client.ambient import capture_ambient
from fuse_cache.client.graph import encode_graph
from fuse_cache.proto import graph_codec
from fuse_cache.proto.container import unpack
from fuse_cache.proto.graph import Argument, Device, Graph, Meta, TensorMeta
from fuse_cache.proto.pass_config import PassConfig, PassContext
from fuse_cache.proto.pass_resolved import ResolvedPassConfig
from fuse_cache.proto.request import Range, RequestFields
from fuse_cache.server.worker.compile import build
from fuse_cache.server.worker.protocol import Job
from tests.models import Captured, build_model, capture, example_inputs
from tests.passes import spellings, spellings_dynamic

HIDDEN = 4096
LARGEST = 64  # of the one symbol that a range is about
SIZES = ((2, 8), (3, 5), (1, 16))  # batch and length of the calls that are compared, where they vary


def _model(name: str, kind: Any, *, layers: int = 2) -> Callable[[], list[Captured]]:
    def trace() -> list[Captured]:
        model = build_model(name, torch.bfloat16, layers=layers)
        sizes = SIZES if kind == "dynamic" else SIZES[:1]
        return [
            capture(model, **example_inputs(model, kind, batch=batch, length=length))
            for batch, length in sizes
        ]

    return trace


def _norm_static(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return spellings.divide(spellings.llama(x, weight), scale)


def _add_norm_token(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    summed = x + residual
    return (*spellings_dynamic.per_token(spellings.llama(summed, weight)), summed)


def _gate_group(x: Tensor) -> tuple[Tensor, ...]:
    gate, up = x.chunk(2, dim=-1)
    return spellings_dynamic.group_row(torch.nn.functional.silu(gate) * up)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _masked_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    positions = torch.arange(k.shape[2], device=q.device)
    mask = positions[None, :] <= positions[:, None]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None])


def _rope(x: Tensor, positions: Tensor) -> Tensor:
    powers = torch.arange(0, 16, 2, device=x.device).float() / 16
    frequencies = torch.outer(positions.float(), 1.0 / (10000**powers))
    cos, sin = (f(torch.cat((frequencies, frequencies), -1)).to(x.dtype) for f in (torch.cos, torch.sin))
    first, second = x[..., :8], x[..., 8:]
    return x * cos + torch.cat((-second, first), -1) * sin


def _mlp(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    h = spellings.llama(x, norm)
    return x + torch.nn.functional.linear(
        torch.nn.functional.silu(torch.nn.functional.linear(h, gate)) * torch.nn.functional.linear(h, up),
        down,
    )


def _function(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Callable[[], list[Captured]]:
    def trace() -> list[Captured]:
        inputs = [
            torch.ones((), dtype=torch.float32) if not shape else torch.randn(shape).bfloat16()
            for shape in shapes
        ]
        return [capture(function, *inputs)]

    return trace


CONTENTS: dict[str, Callable[[], list[Captured]]] = {
    "llama-static": _model("llama", "static"),
    "llama-dynamic": _model("llama", "dynamic"),
    "llama-16-layers": _model("llama", "static", layers=16),
    "qwen3-cache": _model("qwen3", "static_cache"),
    "qwen3-dynamic": _model("qwen3", "dynamic"),
    "part-attention": _function(_attention, (2, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 16)),
    "part-attention-mask": _function(_masked_attention, (2, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 16)),
    "part-rope": _function(_rope, (2, 4, 8, 16), (8,)),
    "part-mlp": _function(_mlp, (2, 8, 64), (64,), (128, 64), (128, 64), (64, 128)),
    "norm-static-fp8": _function(_norm_static, (33, HIDDEN), (HIDDEN,), ()),
    "add-norm-token-fp8": _function(_add_norm_token, (33, HIDDEN), (33, HIDDEN), (HIDDEN,)),
    "gate-group-fp8": _function(_gate_group, (33, 2 * HIDDEN)),
}


def on_cuda(graph: Graph) -> Graph:
    """Return the same graph for tensors on a GPU."""

    def meta(value: Meta) -> Meta:
        if isinstance(value, TensorMeta):
            return dataclasses.replace(value, device="cuda")
        return tuple(map(meta, value)) if isinstance(value, tuple) else value

    def argument(value: Argument) -> Argument:
        if isinstance(value, Device):
            return Device("cuda")
        if isinstance(value, tuple):
            return tuple(map(argument, value))
        return list(map(argument, value)) if isinstance(value, list) else value

    return dataclasses.replace(
        graph,
        inputs=tuple(
            dataclasses.replace(item, meta=dataclasses.replace(item.meta, device="cuda"))
            if isinstance(item.meta, TensorMeta)
            else item
            for item in graph.inputs
        ),
        nodes=tuple(
            node._replace(
                meta=meta(node.meta),
                args=tuple(map(argument, node.args)),
                kwargs=tuple((name, argument(value)) for name, value in node.kwargs),
            )
            for node in graph.nodes
        ),
    )


def request_of(captured: Captured, target: str) -> tuple[bytes, RequestFields, ResolvedPassConfig]:
    """Return the graph's bytes, the request of a host with such a GPU, and the passes in it."""
    graph = on_cuda(encode_graph(captured.gm).graph)
    data = graph_codec.encode(graph)
    with torch.no_grad():
        ambient = capture_ambient()
    resolved = PassConfig().resolve(PassContext(target=target))
    request = RequestFields(
        graph_digest=graph_codec.graph_digest(data),
        pass_config=resolved.encode(),
        range=Range(symbol=0, lower=1, upper=LARGEST) if graph.symbols else Range(),
        target=target,
        ambient=ambient,
    )
    return data, request, resolved


def build_content(captured: Captured, target: str) -> tuple[bytes, bytes, dict[str, Any]]:
    """Return the graph's bytes, the content, and what the build tells of itself."""
    data, request, _ = request_of(captured, target)
    with tempfile.TemporaryDirectory() as folder:
        # As in a worker: tracing has set the user's own by now.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
        os.environ.pop("TRITON_CACHE_DIR", None)
        job = Job(job_id="gpu", dir=Path(folder), graph=data, request=request.encode())
        began = time.perf_counter()
        built = build(job, lambda stage, detail: None)
    sections = unpack(built.content)
    matches = {
        record["name"]: record["matches"]
        for record in built.passes
        if record["is_fusion"] and record["matches"]
    }
    return data, built.content, {
        "seconds": round(time.perf_counter() - began, 1),
        "bytes": len(built.content),
        "cubins": sum(name.startswith("cubin/") for name in sections),
        "kernels": sorted(name.removeprefix("gpu/") for name in sections if name.startswith("gpu/")),
        "fusions": matches,
    }  # fmt: skip


def main(target: str, folder: str, *names: str) -> None:
    """Build every content named, all of them by default, and print one line of JSON for each."""
    if len(names) != 1:  # One process, one build.
        for name in names or CONTENTS:
            subprocess.run([sys.executable, __file__, target, folder, name], check=True)
        return
    for name in names:
        torch.manual_seed(0)
        calls = CONTENTS[name]()
        graph, content, facts = build_content(calls[0], target)
        place = Path(folder) / name
        place.mkdir(parents=True, exist_ok=True)
        # The weights are the same in all of them; torch saves what is shared once.
        torch.save([list(call.arguments) for call in calls], place / "inputs.pt")
        (place / "graph").write_bytes(graph)
        (place / "content").write_bytes(content)
        print(json.dumps({"name": name, **facts}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
