"""The build function of a worker: a graph and a request in, an artifact's content out.

One process makes one build. What it changes in torch it changes for itself alone, and still puts back.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

import torch._inductor.config as inductor_config

from fuse_cache.proto.gpu_target import is_gpu_target
from fuse_cache.proto.graph import Graph
from fuse_cache.proto.request import RequestFields
from fuse_cache.server.worker.artifact import pack_artifact
from fuse_cache.server.worker.guards import artifact_guards, check_covers_range
from fuse_cache.server.worker.inductor import compile_graph
from fuse_cache.server.worker.prepared import prepared, read
from fuse_cache.server.worker.protocol import Built, Emit, Job
from fuse_cache.server.worker.rebuild import Rebuilt
from fuse_cache.server.worker.target_build import building


def preload() -> None:
    """Import all that builds use, so that forks of this process need not."""
    for name in ("torch._inductor.compile_fx", "torch._inductor.lowering", "torch._inductor.codegen.cpp"):
        importlib.import_module(name)


def build(job: Job, emit: Emit) -> Built:
    """Compile the job's graph for its target.

    Raises:
        BuildFailed: with the reason and stage that clients are told.
    """
    started_s = time.perf_counter()
    request, graph = read(job)
    with building(job, request.target, request.target_facts) as own, prepared(request, graph, emit) as ready:
        emit("inductor", request.target)
        rebuilt, patches = ready.rebuilt, {**ready.patches, **own}
        entry = compile_graph(rebuilt.gm, rebuilt.example_inputs, rebuilt.fake_mode, patches)
        emit("seal", "")
        # Kernels are found again by source and compiler flags, which follow from the options.
        with inductor_config.patch(patches):
            content = _pack(entry, graph, request, rebuilt)
    return Built(
        content=content,
        passes=ready.fusing.passes(),
        near_misses=ready.fusing.near_misses(),
        nodes=len(graph.nodes),
        # There is none on a CPU. On a GPU capturing is the caller's, and so is the mode.
        cudagraph_mode="" if is_gpu_target(request.target) else "NONE",
        compile_seconds=time.perf_counter() - started_s,
    )


def _pack(entry: Any, graph: Graph, request: RequestFields, rebuilt: Rebuilt) -> bytes:
    numbers = {symbol: number for number, symbol in enumerate(rebuilt.symbols) if not isinstance(symbol, int)}
    guards = artifact_guards(rebuilt.shape_env, numbers)
    check_covers_range(guards, rebuilt.bounds, rebuilt.hints, request.range.symbol)
    return pack_artifact(
        entry,
        target=request.target,
        inputs=graph.inputs,
        symbols=rebuilt.bounds,
        guards=guards,
        outputs=len(graph.outputs),
    )
