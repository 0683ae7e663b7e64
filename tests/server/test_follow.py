"""What callers of Compile and Wait hear, with nothing real behind it but the table of jobs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fuse_cache.proto.compile_pb2 import CompileEvent, CompileRequest, GraphChunk
from fuse_cache.server.admission import Admitted
from fuse_cache.server.compiler import Compiler
from fuse_cache.server.errors import DamagedUploadError
from fuse_cache.server.follow import Follower
from fuse_cache.server.jobs import Event, Failure, Jobs, Priority
from fuse_cache.server.metrics import Metrics
from fuse_cache.server.workfolder import WorkFolder
from tests.server.harness import Piece, piece, until_async

pytestmark = pytest.mark.apart

NAMESPACE = "team"


class _Store:
    """Holds nothing."""

    async def get_manifest(self, key: bytes) -> None:
        return None


class _Compiler:
    """Takes graphs, and breaks their jobs."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self.taken = 0

    def take(self, job: Any, upload: Any, order: object) -> None:
        upload.keep()
        self.taken += 1
        self._jobs.apply(job, Event.BROKE, failure=Failure(reason="COMPILE_FAILED", message="fake"))


class Stage:
    """A follower with fakes around it."""

    def __init__(self, folder: Path) -> None:
        nothing: Any = None
        self.jobs = Jobs(max_queue=4, now_s=time.monotonic)
        self.compiler = _Compiler(self.jobs)
        store: Any = _Store()
        self.follower = Follower(
            jobs=self.jobs, compiler=cast(Compiler, self.compiler), store=store, work=WorkFolder(folder),
            grants=nothing, metrics=Metrics(),
        )  # fmt: skip
        self.wanted = piece(namespace=NAMESPACE)
        self.key = bytes(range(32))

    def admitted(self, wanted: Piece) -> Admitted:
        key = SimpleNamespace(digest=lambda: self.key, namespace=NAMESPACE)
        found: Any = SimpleNamespace(
            key=key, request=wanted.request, request_bytes=b"", epoch=None, builder=None, model=""
        )
        return cast(Admitted, found)

    async def compile(self, *chunks: tuple[float, bytes], heard: list[CompileEvent]) -> None:
        """Send chunks, each after so many seconds; then nothing more."""
        pending, offset = list(chunks), 0

        async def receive() -> CompileRequest | None:
            nonlocal offset
            if not pending:
                await asyncio.sleep(60)
            after_s, data = pending.pop(0)
            await asyncio.sleep(after_s)
            last = offset + len(data) == len(self.wanted.graph)
            message = CompileRequest(chunk=GraphChunk(data=data, offset=offset, last=last))
            offset += len(data)
            return message

        await self.follower.compile(
            self.admitted(self.wanted), priority=Priority.HOST, graph_bytes=len(self.wanted.graph),
            inline_limit=0, send=_into(heard), receive=receive,
        )  # fmt: skip

    async def wait(self, heard: list[CompileEvent], namespace: str = NAMESPACE) -> None:
        await self.follower.wait(self.key, namespace, inline_limit=0, send=_into(heard))


def _into(heard: list[CompileEvent]) -> Callable[[CompileEvent], Any]:
    async def send(event: CompileEvent) -> None:
        heard.append(event)

    return send


def kinds(heard: list[CompileEvent]) -> list[str | None]:
    return [event.WhichOneof("event") for event in heard]


async def test_a_sender_of_single_bytes_gives_way_to_one_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fuse_cache.server.pace.PATIENCE_S", 0.3)
    stage = Stage(tmp_path)
    graph = stage.wanted.graph
    slow: list[CompileEvent] = []
    other: list[CompileEvent] = []
    began_s = time.monotonic()
    trickle = asyncio.create_task(
        stage.compile(*((0.2, graph[i : i + 1]) for i in range(len(graph))), heard=slow)
    )
    await until_async(lambda: "need_graph" in kinds(slow))
    await stage.compile((0.0, graph), heard=other)
    assert kinds(other)[-1] == "failed", "it was taken, and the fake compiler broke it"
    assert stage.compiler.taken == 1
    with pytest.raises(DamagedUploadError, match="too slow"):
        await trickle
    assert time.monotonic() - began_s < 5, "not one byte's patience times the bytes of the graph"


async def test_who_waits_hears_at_once_that_nobody_is_left_to_send_the_graph(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    waiting: list[CompileEvent] = []
    sender = asyncio.create_task(stage.compile(heard=[]))
    await until_async(lambda: stage.jobs.find(stage.key) is not None)
    waiter = asyncio.create_task(stage.wait(waiting))
    await until_async(lambda: bool(waiting))
    assert kinds(waiting) == ["queued"], "while somebody may send it, it may still come"
    sender.cancel()
    await asyncio.gather(sender, return_exceptions=True)
    async with asyncio.timeout(0.5):
        await waiter
    assert kinds(waiting)[-1] == "unknown"
    assert stage.jobs.find(stage.key) is None


async def test_a_remembered_failure_is_told_to_its_own_namespace_only(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    job = stage.jobs.join(stage.key, "a", Priority.HOST, NAMESPACE)
    failure = Failure(reason="COMPILE_FAILED", message="secret_model.py", deterministic=True)
    stage.jobs.apply(job, Event.BROKE, failure=failure)
    theirs: list[CompileEvent] = []
    ours: list[CompileEvent] = []
    await stage.wait(theirs, namespace="others")
    await stage.wait(ours)
    assert kinds(theirs) == ["unknown"]
    assert kinds(ours) == ["failed"]
