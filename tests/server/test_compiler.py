"""What becomes of a job whose graph cannot be checked."""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path
from typing import Any, cast

import pytest

from fuse_cache.proto.graph_codec import graph_digest
from fuse_cache.server.checker import GraphChecker, ValidatorGaveUpError
from fuse_cache.server.compiler import Compiler, Order
from fuse_cache.server.errors import InvalidRequestError
from fuse_cache.server.jobs import Failure, Jobs, Priority
from fuse_cache.server.metrics import Metrics
from fuse_cache.server.spool import Upload
from fuse_cache.server.workfolder import WorkFolder
from tests.server.harness import tiny_graph, until_async

KEY = bytes(32)


class _Checker:
    def __init__(self, error: Exception) -> None:
        self._error = error

    async def check(self, graph: Path) -> None:
        raise self._error


async def _outcome(folder: Path, error: Exception) -> tuple[Failure, Jobs]:
    """Return how the job ended, and the jobs that may remember it."""
    nothing: Any = None
    jobs, work = Jobs(max_queue=4, now_s=time.monotonic), WorkFolder(folder)
    compiler = Compiler(
        jobs=jobs, checker=cast(GraphChecker, _Checker(error)), store=nothing, work=work,
        kept=nothing, signing_key=nothing, metrics=Metrics(), workers=1, op_modules=(),
    )  # fmt: skip
    graph = tiny_graph()
    upload = Upload(work, digest=graph_digest(graph), size_bytes=len(graph))
    await upload.add(graph, 0, last=True)
    job = jobs.join(KEY, "job", Priority.HOST)
    compiler.take(job, upload, cast(Order, None))
    await until_async(lambda: job.finished)
    await compiler.drain(5.0)
    assert job.failure is not None
    assert work.reserve(1 << 30), "the budget was given back"
    return job.failure, jobs


class _StuckChecker:
    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def check(self, graph: Path) -> None:
        await self.go_on.wait()
        raise InvalidRequestError("GRAPH_MALFORMED", "bad")


async def _whole(work: WorkFolder) -> Upload:
    graph = tiny_graph()
    upload = Upload(work, digest=graph_digest(graph), size_bytes=len(graph))
    await upload.add(graph, 0, last=True)
    return upload


async def test_a_graph_that_comes_whole_during_a_drain_ends_its_job_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nothing: Any = None
    jobs, work, checker = Jobs(max_queue=4, now_s=time.monotonic), WorkFolder(tmp_path), _StuckChecker()
    compiler = Compiler(
        jobs=jobs, checker=cast(GraphChecker, checker), store=nothing, work=work,
        kept=nothing, signing_key=nothing, metrics=Metrics(), workers=1, op_modules=(),
    )  # fmt: skip
    first = jobs.join(KEY, "first", Priority.HOST)
    compiler.take(first, await _whole(work), cast(Order, None))
    draining = asyncio.create_task(compiler.drain(0.2))
    await asyncio.sleep(0)
    second = jobs.join(bytes([1]) * 32, "second", Priority.HOST)
    upload = await _whole(work)
    compiler.take(second, upload, cast(Order, None))
    await upload.close()
    await draining
    checker.go_on.set()
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
    for _ in range(20):
        await asyncio.sleep(0.01)
    gc.collect()
    await asyncio.sleep(0)
    assert not unhandled
    for job in (first, second):
        assert job.failure is not None
        assert job.failure.reason == "DRAINING"
    assert compiler.busy == 0
    assert work.reserve(1 << 30), "the budget was given back"


async def test_a_refusal_is_remembered(tmp_path: Path) -> None:
    failure, jobs = await _outcome(tmp_path, InvalidRequestError("GRAPH_MALFORMED", "bad"))
    assert failure.refused
    assert jobs.remembered(KEY, "") is not None


@pytest.mark.parametrize("reason", ["GRAPH_TOO_LARGE", "GRAPH_MALFORMED"])
async def test_a_time_out_or_death_of_the_validator_is_refused_and_not_remembered(
    tmp_path: Path, reason: str
) -> None:
    failure, jobs = await _outcome(tmp_path, ValidatorGaveUpError(reason, "no answer"))
    assert failure.refused
    assert jobs.remembered(KEY, "") is None


async def test_an_error_of_the_machine_ends_the_job_instead_of_leaving_its_waiters(tmp_path: Path) -> None:
    failure, jobs = await _outcome(tmp_path, OSError(24, "Too many open files"))
    assert (failure.reason, failure.stage, failure.refused) == ("INTERNAL", "check", False)
    assert "Too many open files" in failure.message
    assert jobs.remembered(KEY, "") is None
