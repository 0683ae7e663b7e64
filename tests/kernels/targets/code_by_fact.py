"""Compiles one small graph for a GPU with each of its facts changed alone; prints which of them changed the
code.

`python code_by_fact.py TARGET FOLDER [each]`; the last line is JSON: fact -> whether the content differs.
Without `each`, the facts that are in no request change together, which takes a third of the time.
Every build is a fork of this process, as a worker's is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
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
from fuse_cache.proto.target_facts import CODE_FACTS
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


def changed(gpu: Gpu, *, each: bool) -> dict[str, Gpu]:
    """Return the GPU with each fact changed, by the fact's name; those in no request together as "(rest)"."""
    new: dict[str, Any] = {
        "multiprocessors": gpu.multiprocessors // 2,
        "threads": 3584 - gpu.architecture.threads,  # 2048 instead of 1536, and the other way round
        "product": "NVIDIA Other",
        "l2_bytes": gpu.l2_bytes // 4,
        "memory_bytes": gpu.memory_bytes // 4,
        "clock_khz": gpu.clock_khz // 2,
        "memory_clock_khz": gpu.memory_clock_khz // 2,
        "memory_bus_bits": 64,
        "shared_kib": gpu.architecture.shared_kib // 2,
    }
    if each:
        return {name: with_facts(gpu, {name: value}) for name, value in new.items()}
    rest = {name: value for name, value in new.items() if name not in CODE_FACTS}
    return {
        **{name: with_facts(gpu, {name: new[name]}) for name in sorted(CODE_FACTS)},
        "(rest)": with_facts(gpu, rest),
    }


def with_facts(gpu: Gpu, facts: Mapping[str, Any]) -> Gpu:
    """Return `gpu` with these facts, whether they are its own or its architecture's."""
    of_all = {name: value for name, value in facts.items() if hasattr(gpu.architecture, name)}
    own = {name: value for name, value in facts.items() if name not in of_all}
    return dataclasses.replace(gpu, architecture=dataclasses.replace(gpu.architecture, **of_all), **own)


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


def main(target: str, folder: str, *words: str) -> None:
    """Build for the target, again, and with each fact changed; print what differed."""
    if is_cpu_wheel():
        register_guard(Path(folder))
    preload()
    x: Any = torch.randn(4096, 4096).bfloat16()
    graph = graph_codec.encode(on_cuda(encode_graph(capture(graph_of_all_kinds, x, x.clone()).gm).graph))
    gpu = find_gpu(target)
    before = digests(target, gpu, graph)
    outcome = {"(nothing)": digests(target, gpu, graph) != before}
    for name, other in changed(gpu, each="each" in words).items():
        outcome[name] = digests(target, other, graph) != before
        print(name, outcome[name], file=sys.stderr, flush=True)
    print(json.dumps(outcome))


if __name__ == "__main__":
    main(*sys.argv[1:])
