"""What compiling a graph and explaining its passes begin with: read it, rebuild it, prepare the passes."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch._inductor.config as inductor_config
from torch.fx import GraphModule

from fuse_cache.passes.dump import Observer
from fuse_cache.proto import graph_codec
from fuse_cache.proto.errors import GraphError
from fuse_cache.proto.gpu_target import ARCHITECTURES, is_gpu_target
from fuse_cache.proto.graph import Graph, TensorMeta
from fuse_cache.proto.inductor_options import check_options
from fuse_cache.proto.request import RequestFields, decode_request
from fuse_cache.server.worker.ambient import ambient_state
from fuse_cache.server.worker.attention import Policy
from fuse_cache.server.worker.errors import NotCacheable
from fuse_cache.server.worker.fusing import Fusing
from fuse_cache.server.worker.protocol import BuildFailed, Emit, Job
from fuse_cache.server.worker.rebuild import Rebuilt, rebuild


@dataclass(frozen=True, slots=True)
class Prepared:
    """A graph ready for Inductor: `patches` of its configuration run the passes of `fusing`."""

    rebuilt: Rebuilt
    fusing: Fusing
    patches: dict[str, Any]


def read(job: Job) -> tuple[RequestFields, Graph]:
    """Import the job's operators and decode its files.

    Raises:
        BuildFailed: one of them is malformed, or nothing that may be compiled.
    """
    for name in job.op_modules:
        importlib.import_module(name)
    try:
        graph = graph_codec.decode(job.graph)
    except GraphError as error:
        raise BuildFailed("GRAPH_MALFORMED", str(error), stage="rebuild") from error
    try:
        request = decode_request(job.request)
    except ValueError as error:
        raise BuildFailed("REQUEST_MALFORMED", str(error), stage="rebuild") from error
    return request, graph


@contextmanager
def prepared(
    request: RequestFields, graph: Graph, emit: Emit, observers: tuple[Observer, ...] = ()
) -> Iterator[Prepared]:
    """Rebuild the graph under the request's ambient state, which holds in the block.

    Raises:
        BuildFailed: as of `rebuild`, or the request's options or passes are not of this version.
    """
    _refuse_unfit(graph, request)
    emit("rebuild", f"{len(graph.nodes)} nodes")
    with ambient_state(request.ambient):
        policy = None
        if is_gpu_target(request.target):
            policy = Policy(ARCHITECTURES[request.target], _allowed(request))
        rebuilt = rebuild(graph, request.range, policy)
        fusing = Fusing(request, observers)
        yield Prepared(rebuilt, fusing, _patches(rebuilt.gm, request, fusing))


def _allowed(request: RequestFields) -> tuple[str, ...]:
    """Return the attention kernels that the host lets torch choose among: the one that it names, if any."""
    chosen = request.attention_backend
    return request.ambient.sdpa_backends if chosen == "auto" else (chosen,)


def _refuse_unfit(graph: Graph, request: RequestFields) -> None:
    if not graph.nodes:
        raise NotCacheable("the graph computes nothing", stage="rebuild")
    trains = any(isinstance(item.meta, TensorMeta) and item.meta.requires_grad for item in graph.inputs)
    asked = request.ambient.grad_mode or any(
        node.target == "torch._C._set_grad_enabled" and node.args == (True,) for node in graph.nodes
    )
    if trains and asked and not request.ambient.inference_mode:
        raise NotCacheable("gradients are on: artifacts are for inference (torch.no_grad)", stage="rebuild")


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
