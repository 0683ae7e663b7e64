"""The build function of a worker: a graph and a request in, an artifact's content out.

One process makes one build. What it changes in torch it changes for itself alone, and still puts back.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch._inductor.config as inductor_config
from torch.fx import GraphModule

from fuse_cache.proto import graph_codec
from fuse_cache.proto.errors import GraphError
from fuse_cache.proto.graph import Graph, TensorMeta
from fuse_cache.proto.inductor_options import check_options
from fuse_cache.proto.request import RequestFields, decode_request
from fuse_cache.server.worker.ambient import ambient_state
from fuse_cache.server.worker.artifact_cpu import pack_artifact
from fuse_cache.server.worker.errors import NotCacheable, TargetUnavailable
from fuse_cache.server.worker.fusing import Fusing
from fuse_cache.server.worker.guards import artifact_guards, check_covers_range
from fuse_cache.server.worker.inductor import compile_graph
from fuse_cache.server.worker.isa import ISA_BUILDS, IsaBuild, building_for
from fuse_cache.server.worker.protocol import BuildFailed, Built, Emit, Job
from fuse_cache.server.worker.rebuild import Rebuilt, rebuild
from fuse_cache.server.worker.seed import HEADERS, use_headers
from fuse_cache.server.worker.unloaded import unloaded_kernels


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
    request, graph = _read(job)
    isa = ISA_BUILDS.get(request.target)
    if isa is None:
        raise TargetUnavailable(f"this worker builds for {', '.join(ISA_BUILDS)}, not for {request.target}")
    _refuse_unfit(graph, request)
    emit("rebuild", f"{len(graph.nodes)} nodes")
    with ambient_state(request.ambient):
        rebuilt = rebuild(graph, request.range)
        fusing = Fusing(request)
        emit("inductor", request.target)
        with _compiling(job, isa):
            patches = _patches(rebuilt.gm, request, fusing)
            entry = compile_graph(rebuilt.gm, rebuilt.example_inputs, rebuilt.fake_mode, patches)
            emit("seal", "")
            # Kernels are found again by source and compiler flags, which follow from the options.
            with inductor_config.patch(patches):
                content = _pack(entry, graph, request, rebuilt)
    return Built(
        content=content,
        passes=fusing.passes(),
        near_misses=fusing.near_misses(),
        nodes=len(graph.nodes),
        cudagraph_mode="NONE",  # there is none on a CPU
        compile_seconds=time.perf_counter() - started_s,
    )


def _read(job: Job) -> tuple[RequestFields, Graph]:
    for name in job.op_modules:
        importlib.import_module(name)
    try:
        graph = graph_codec.decode(job.graph)
    except GraphError as error:
        raise BuildFailed("GRAPH_MALFORMED", str(error), stage="rebuild") from error
    try:
        return decode_request(job.request), graph
    except ValueError as error:
        raise BuildFailed("REQUEST_MALFORMED", str(error), stage="rebuild") from error


def _refuse_unfit(graph: Graph, request: RequestFields) -> None:
    if not graph.nodes:
        raise NotCacheable("the graph computes nothing", stage="rebuild")
    trains = any(isinstance(item.meta, TensorMeta) and item.meta.requires_grad for item in graph.inputs)
    asked = request.ambient.grad_mode or any(
        node.target == "torch._C._set_grad_enabled" and node.args == (True,) for node in graph.nodes
    )
    if trains and asked and not request.ambient.inference_mode:
        raise NotCacheable("gradients are on: artifacts are for inference (torch.no_grad)", stage="rebuild")


@contextlib.contextmanager
def _compiling(job: Job, isa: IsaBuild) -> Iterator[None]:
    """Compile in the job's own folder, from the seed's headers."""
    headers = job.dir / HEADERS
    if job.seed_dir is not None:
        use_headers(job.seed_dir / HEADERS, headers)
    cache = Path(os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(job.dir / "inductor")))
    cache.mkdir(parents=True, exist_ok=True)
    with building_for(isa, headers), unloaded_kernels():
        yield


def _patches(gm: GraphModule, request: RequestFields, fusing: Fusing) -> dict[str, Any]:
    known = inductor_config.get_config_copy()
    try:
        options = dict(check_options(dict(request.inductor_options)))
    except ValueError as error:
        raise BuildFailed("REQUEST_MALFORMED", str(error), stage="inductor") from error
    unknown = sorted(name for name in options if name not in known)
    if unknown:
        raise BuildFailed(
            "REQUEST_MALFORMED", f"this torch has no Inductor option {unknown[0]}", stage="inductor"
        )
    return fusing.inductor_patches(gm, options)


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
