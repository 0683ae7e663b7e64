"""Compiles one small graph for a GPU with each of its facts changed alone; prints which of them changed the
code.

`python code_by_fact.py TARGET FOLDER`; the last line is JSON: fact -> whether wrapper or kernels differ.
Every build is a fork of this process, as a worker's is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuse_cache.client.ambient import capture_ambient
from fuse_cache.client.graph import encode_graph
from fuse_cache.kernels.targets.cpu_wheel import is_cpu_wheel, register_guard
from fuse_cache.proto import graph_codec
from fuse_cache.proto.container import unpack
from fuse_cache.proto.gpu_target import Gpu, find_gpu
from fuse_cache.proto.pass_config import PassConfig, PassContext
from fuse_cache.proto.request import Range, RequestFields
from fuse_cache.server.worker import target_build
from fuse_cache.server.worker.compile import build, preload
from fuse_cache.server.worker.protocol import Job
from tests.gpu.build_contents import on_cuda
from tests.models import capture


def graph_of_all_kinds(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """One value at a time, rows, few long rows, one sum of all, columns: what is cut up by other rules."""
    wide = (x + y).float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (
        torch.nn.functional.silu(x) * y,
        normed.to(x.dtype),
        torch.softmax(x.reshape(2, -1).float(), -1),
        (x.float() * y.float()).sum(),
        y.float().amax(0),
    )


def changed(gpu: Gpu) -> dict[str, Gpu]:
    """Return the GPU with each fact changed, by the fact's name."""
    architecture = gpu.architecture
    new = {
        "product": "NVIDIA Other",
        "multiprocessors": gpu.multiprocessors // 2,
        "l2_bytes": gpu.l2_bytes // 4,
        "memory_bytes": gpu.memory_bytes // 4,
        "clock_khz": gpu.clock_khz // 2,
        "memory_clock_khz": gpu.memory_clock_khz // 2,
        "memory_bus_bits": 64,
    }
    gpus = {name: dataclasses.replace(gpu, **{name: value}) for name, value in new.items()}  # type: ignore[arg-type]
    for other in (
        dataclasses.replace(architecture, threads=3584 - architecture.threads),  # 1536 and 2048 swapped
        dataclasses.replace(architecture, shared_kib=architecture.shared_kib // 2),
    ):
        name = "threads" if other.threads != architecture.threads else "shared_kib"
        gpus[name] = dataclasses.replace(gpu, architecture=other)
    return gpus


def digests(target: str, gpu: Gpu, graph: bytes) -> dict[str, str]:
    """Return the digest of each part of the content, built by a child of this process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(write, json.dumps(_build(target, gpu, graph)).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with open(read, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the build for {gpu} failed"
    found: dict[str, str] = json.loads(answer)
    return found


def _build(target: str, gpu: Gpu, graph: bytes) -> dict[str, str]:
    vars(target_build)["gpu_of"] = lambda target, facts: gpu
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
        os.environ["TRITON_CACHE_DIR"] = f"{folder}/triton"
        with torch.no_grad():
            ambient = capture_ambient()
        request = RequestFields(
            graph_digest=graph_codec.graph_digest(graph),
            pass_config=PassConfig().resolve(PassContext(target=target), "O0").encode(),
            range=Range(),
            target=target,
            ambient=ambient,
        )
        job = Job(job_id="facts", dir=Path(folder), graph=graph, request=request.encode())
        sections = unpack(build(job, lambda stage, detail: None).content)
    # AOTAutograd's record holds times.
    return {name: hashlib.sha256(data).hexdigest() for name, data in sections.items() if name != "aot"}


def main(target: str, folder: str) -> None:
    """Build for the target, again, and with each fact changed; print what differed."""
    if is_cpu_wheel():
        register_guard(Path(folder))
    preload()
    x: Any = torch.randn(4096, 4096).bfloat16()
    graph = graph_codec.encode(on_cuda(encode_graph(capture(graph_of_all_kinds, x, x.clone()).gm).graph))
    gpu = find_gpu(target)
    before = digests(target, gpu, graph)
    outcome = {"(nothing)": digests(target, gpu, graph) != before}
    for name, other in changed(gpu).items():
        outcome[name] = digests(target, other, graph) != before
        print(name, outcome[name], file=sys.stderr, flush=True)
    print(json.dumps(outcome))


if __name__ == "__main__":
    main(*sys.argv[1:])
