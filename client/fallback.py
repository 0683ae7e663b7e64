"""Compiles here, with the same passes, when no artifact can be had. The only place in the client that runs
passes or Inductor."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.fx import GraphModule

from fuse_cache.client.aliasing import SharedMemory
from fuse_cache.client.options import CompileOptions
from fuse_cache.client.reports import GraphReport, cudagraph_mode, pass_row
from fuse_cache.proto.pass_config import ResolvedPassConfig
from fuse_cache.proto.request import Range

_log = logging.getLogger("fuse_cache.client")


@dataclass(slots=True)
class LocalBuild:
    """A callable made here, and what the passes did."""

    call: Callable[..., Any]
    describe: Callable[[GraphReport], None] = field(default=lambda report: None)


def compile_plain(gm: GraphModule, example_inputs: Sequence[Any], options: CompileOptions) -> LocalBuild:
    """Compile as backend="inductor" would: mode="off"."""
    return LocalBuild(_inductor(gm, example_inputs, dict(options.inductor)))


def compile_while_tracing(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    resolved: ResolvedPassConfig,
    compile_range: Range,
    target: str,
    options: CompileOptions,
) -> LocalBuild:
    """Compile inside the backend: what Inductor assumes of the sizes becomes guards of Dynamo's. Leaves `gm`
    as it is."""
    if not any(node.op in ("call_function", "call_method", "call_module") for node in gm.graph.nodes):
        return LocalBuild(gm.forward)  # Nothing to compile, and Inductor need not like it.
    patches, describe = _passes(gm, resolved, compile_range, target, options)
    with_passes = _WithPasses(patches, describe, options)
    return LocalBuild(with_passes(copy_of(gm), example_inputs), with_passes.describe)


def compile_when_called(
    gm: GraphModule,
    resolved: ResolvedPassConfig,
    compile_range: Range,
    target: str,
    options: CompileOptions,
) -> LocalBuild:
    """Return a callable that is compiled at its first call, by a torch.compile of its own.

    By then Dynamo's guards for the graph are settled, so what Inductor assumes now needs guards elsewhere:
    the inner torch.compile has its own, and compiles again where they fail.
    """
    patches, describe = _passes(gm, resolved, compile_range, target, options)

    with_passes = _WithPasses(patches, describe, options)
    return LocalBuild(torch.compile(copy_of(gm), backend=with_passes, dynamic=True), with_passes.describe)


class _WithPasses:
    """Compiles with our passes, or without any where one of them fails: a bug of ours must not be worse than
    no passes at all. With `strict` it is raised."""

    def __init__(
        self, patches: dict[str, Any], describe: Callable[[GraphReport], None], options: CompileOptions
    ) -> None:
        self._patches = patches
        self._describe = describe
        self._options = options
        self._problem = ""

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        from fuse_cache.passes.base import pass_error

        # AOTAutograd's own cache does not tell graphs apart by which inputs share memory.
        uncached = {"force_disable_caches": True} if SharedMemory(gm).is_shared else {}
        try:
            return _inductor(copy_of(gm), example_inputs, {**self._patches, **uncached})
        except Exception as error:
            failed = pass_error(error)
            if failed is None or self._options.strict:
                raise
            self._problem = f"compiled without passes: {failed}"
        _log.warning(self._problem)
        return _inductor(gm, example_inputs, {**dict(self._options.inductor), **uncached})

    def describe(self, report: GraphReport) -> None:
        """Tell a report what the passes did, or why none did anything."""
        if not self._problem:
            self._describe(report)
        elif self._problem not in report.reason:
            report.reason = "; ".join(filter(None, (report.reason, self._problem)))


def _inductor(gm: GraphModule, example_inputs: Sequence[Any], patches: dict[str, Any]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    compiled = compile_fx(gm, list(example_inputs), config_patches=patches)
    return cast("Callable[..., Any]", compiled)  # its other forms are AOTInductor's


def copy_of(gm: GraphModule) -> GraphModule:
    """Return a module with a graph of its own over the same tensors: Inductor takes graphs apart."""
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    outputs = graph.graph_copy(gm.graph, copies)
    output = graph.output(outputs)
    output.meta = copy.copy(next(iter(reversed(gm.graph.nodes))).meta)
    made = GraphModule(gm, graph)
    made.meta = copy.copy(gm.meta)
    return made


def _passes(
    gm: GraphModule,
    resolved: ResolvedPassConfig,
    compile_range: Range,
    target: str,
    options: CompileOptions,
) -> tuple[dict[str, Any], Callable[[GraphReport], None]]:
    """Return the Inductor options that run our passes, and a function that tells a report what they did."""
    from fuse_cache.passes.manager import PassManager

    manager = PassManager(resolved, compile_range, target, dump_dir=options.dump_dir)
    patches: dict[str, Any] = manager.inductor_patches(gm, dict(options.inductor))
    if options.strict or options.dump_dir is not None:
        # Inductor's own cache would answer without running a pass, and there would be nothing to count or
        # dump.
        patches["force_disable_caches"] = True

    def describe(report: GraphReport) -> None:
        report.fusions = manager.fusions()
        report.cudagraph_mode = cudagraph_mode(report.target or "cpu", resolved.cudagraph_mode)
        report.near_misses = [
            {"pass": miss.pass_name, "reason": miss.reason, "node": miss.node, "detail": miss.detail}
            for miss in manager.near_misses()
        ]
        report.passes = [
            pass_row(record.name, record.on, record.reason, record) for record in manager.report()
        ]

    return patches, describe
