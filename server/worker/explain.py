"""What the passes do to a graph, without compiling it: the same rebuilding and passes as a build's.

A daemon runs `explain` in a worker. The command line runs this module in a process of its own, for a graph
file that no daemon need know.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from google.protobuf.message import DecodeError

from fuse_cache.passes import record
from fuse_cache.passes.dump import Dumper, Observer
from fuse_cache.proto import compile_pb2 as wire
from fuse_cache.proto.artifact_pb2 import CompileRange, KeyField, NearMiss, PassRecord
from fuse_cache.proto.request import Range
from fuse_cache.server.worker.inductor import run_passes
from fuse_cache.server.worker.prepared import prepared, read
from fuse_cache.server.worker.protocol import EXIT_BUILT, EXIT_FAILED, BuildFailed, Built, Emit, Job

_MARKS = {
    record.Mark.KEPT: wire.MARK_KEPT,
    record.Mark.REMOVED: wire.MARK_REMOVED,
    record.Mark.ADDED: wire.MARK_ADDED,
    record.Mark.REWIRED: wire.MARK_REWIRED,
}


def explain(job: Job, emit: Emit, observers: tuple[Observer, ...] = ()) -> Built:
    """Run the passes of the job's request; the content is a serialised ExplainResponse.

    `observers` are told the graph before and after each pass, too.

    Raises:
        BuildFailed: with the reason and stage that clients are told.
    """
    started_s = time.perf_counter()
    request, graph = read(job)
    recorder = record.Recorder()
    with prepared(request, graph, emit, (recorder, *observers)) as ready:
        emit("passes", request.target)
        rebuilt = ready.rebuilt
        run_passes(rebuilt.gm, rebuilt.example_inputs, rebuilt.fake_mode, ready.patches)
    response = wire.ExplainResponse(
        passes=[PassRecord(**one) for one in ready.fusing.passes()],
        near_misses=[
            NearMiss(
                reason=miss["reason"],
                node=miss["node"],
                detail=miss["detail"],
                **{"pass": miss["pass_name"]},  # A keyword of Python.
            )
            for miss in ready.fusing.near_misses()
        ],
        dumps=[_dump(change) for change in recorder.changes],
        patterns=[KeyField(name=name, value=source) for name, source in recorder.patterns.items()],
        target=request.target,
        nodes=len(graph.nodes),
        range=_range(request.range),
    )
    return Built(
        content=response.SerializeToString(),
        passes=ready.fusing.passes(),
        near_misses=ready.fusing.near_misses(),
        nodes=len(graph.nodes),
        compile_seconds=time.perf_counter() - started_s,
    )


def _range(bounds: Range) -> CompileRange:
    symbol_plus_one = 0 if bounds.symbol is None else bounds.symbol + 1
    return CompileRange(lower=bounds.lower, upper=bounds.upper, symbol_plus_one=symbol_plus_one)


def _dump(change: record.Change) -> wire.GraphDump:
    return wire.GraphDump(
        nodes_before=change.nodes_before,
        nodes_after=change.nodes_after,
        sites=[
            wire.DumpSite(
                before=[_node(node) for node in site.before],
                after=[_node(node) for node in site.after],
                times=site.times,
                also_at=site.also_at,
            )
            for site in change.sites
        ],
        sites_left_out=change.sites_left_out,
        **{"pass": change.pass_name},
    )


def _node(node: record.ShownNode) -> wire.DumpNode:
    return wire.DumpNode(
        name=node.name, call=node.call, value=node.value, mark=_MARKS[node.mark], inputs=node.inputs
    )


def main(arguments: list[str] | None = None) -> int:
    """Explain a file that holds a serialised ExplainRequest with a graph; write the response to another."""
    parser = argparse.ArgumentParser(prog="python -m fuse_cache.server.worker.explain")
    parser.add_argument("request", type=Path)
    parser.add_argument("response", type=Path)
    parser.add_argument("--op-module", action="append", default=[], help="module of custom operators")
    parser.add_argument("--dump", type=Path, help="folder for each graph and the patterns, as Python")
    options = parser.parse_args(arguments)
    observers = (Dumper(options.dump),) if options.dump is not None else ()
    with tempfile.TemporaryDirectory(prefix="fuse-cache-explain-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        try:
            asked = wire.ExplainRequest.FromString(options.request.read_bytes())
            job = Job(
                job_id="explain",
                dir=Path(folder),
                graph=asked.graph,
                request=asked.request,
                op_modules=tuple(options.op_module),
            )
            options.response.write_bytes(explain(job, lambda stage, detail: None, observers).content)
        except BuildFailed as failure:
            print(f"{failure.reason} ({failure.stage or 'start'}): {failure.message}", file=sys.stderr)
            return EXIT_FAILED
        except (DecodeError, ImportError) as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return EXIT_FAILED
    return EXIT_BUILT


if __name__ == "__main__":
    sys.exit(main())
