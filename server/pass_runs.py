"""Runs the passes on a graph in a worker, for whoever wants to see what they do. Compiles nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

from google.protobuf.message import DecodeError

from fuse_cache.proto.compile_pb2 import ExplainResponse
from fuse_cache.proto.errors import RequestError as MalformedRequest
from fuse_cache.proto.limits import GRAPH_LIMITS
from fuse_cache.proto.request import decode_request
from fuse_cache.server.checker import GraphChecker
from fuse_cache.server.errors import BusyError, InvalidRequestError, UnavailableError
from fuse_cache.server.worker.pool import WorkerError, WorkerPool
from fuse_cache.server.worker.protocol import write_job_files
from fuse_cache.server.workfolder import WorkFolder

ENTRY = "fuse_cache.server.worker.explain:explain"
# One runs, so many wait: hosts that wait for an artifact go before people who look at one.
MAX_WAITING = 8
MOST_BYTES = (
    7 << 20
)  # gRPC sends 8 MiB here (`daemon.py`); a model of ten layers takes 0.1, and of more not much more.


class PassRuns:
    """One run at a time, beside the compilations."""

    def __init__(
        self, checker: GraphChecker, pool: WorkerPool, work: WorkFolder, op_modules: tuple[str, ...]
    ) -> None:
        self._checker = checker
        self._pool = pool
        self._work = work
        self._op_modules = op_modules
        self._one = asyncio.Lock()  # Guards the one worker.
        self._waiting = 0

    async def run(self, graph: bytes, request: bytes) -> ExplainResponse:
        """Return what the passes of this request do to this graph.

        Raises:
            InvalidRequestError: graph or request is malformed, or the passes cannot run on it.
            BusyError: too many wait already.
            UnavailableError: there is no worker, or it died.
        """
        _check(graph, request)
        if self._waiting > MAX_WAITING:
            raise BusyError("QUEUE_FULL", "others wait for an explanation here", retry_after_s=5.0)
        if not self._work.reserve(len(graph)):
            raise BusyError("QUOTA", "too many graphs are waiting on this daemon's disk", retry_after_s=2.0)
        self._waiting += 1
        try:
            async with self._one:
                folder = await asyncio.to_thread(self._work.new_folder, "explain")
                try:
                    return await self._run(folder, graph, request)
                finally:
                    await self._work.remove(folder)
        except OSError as error:
            raise UnavailableError("INTERNAL", f"no room for it on this daemon's disk: {error}") from error
        finally:
            self._waiting -= 1
            self._work.release(len(graph))

    async def _run(self, folder: Path, graph: bytes, request: bytes) -> ExplainResponse:
        await asyncio.to_thread((folder / "graph").write_bytes, graph)
        await self._checker.check(folder / "graph")
        write_job_files(folder, job_id=folder.name, request=request, op_modules=self._op_modules, entry=ENTRY)
        try:
            built = await self._pool.run(folder.name, folder, lambda stage, detail: None)
            return fitting(built.content)
        except DecodeError as error:
            raise UnavailableError("WORKER_DIED", "the worker's answer cannot be read") from error
        except WorkerError as error:
            refused = error.deterministic
            kind = InvalidRequestError if refused else UnavailableError
            raise kind(error.reason, f"{error.stage or 'start'}: {error.message}") from error


def fitting(content: bytes, limit_bytes: int = MOST_BYTES) -> ExplainResponse:
    """Return a worker's answer, without the drawings where one message cannot hold them.

    Raises:
        DecodeError: it is none.
    """
    response = ExplainResponse.FromString(content)
    if len(content) > limit_bytes:
        del response.dumps[:]
        response.graphs_missing = (
            f"what the passes changed takes {len(content)} bytes, more than a message holds: give "
            "`fuse-cache explain fusions` the graph file, which it runs on its own machine"
        )
    return response


def _check(graph: bytes, request: bytes) -> None:
    if not 0 < len(graph) <= GRAPH_LIMITS.size_bytes:
        limit = GRAPH_LIMITS.size_bytes
        raise InvalidRequestError(
            "GRAPH_TOO_LARGE", f"the graph has {len(graph)} bytes, the limit is {limit}"
        )
    try:
        fields = decode_request(request)
    except MalformedRequest as error:
        raise InvalidRequestError("REQUEST_MALFORMED", f"request: {error}") from error
    # Here: a daemon starts without the tables of graphs.
    from fuse_cache.proto.graph_codec import graph_digest

    if fields.graph_digest != graph_digest(graph):
        raise InvalidRequestError("DIGEST_MISMATCH", "the request names another graph than the one sent")
