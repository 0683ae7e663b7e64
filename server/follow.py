"""One caller's view of a compilation: send the graph if asked to, hear how it goes, get the result."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Protocol

from fuse_cache.proto.artifact_pb2 import SignedManifest
from fuse_cache.proto.compile_pb2 import (
    CompileEvent,
    CompileRequest,
    Compiling,
    Done,
    ErrorReason,
    Failed,
    Queued,
)
from fuse_cache.proto.limits import INLINE_BYTES
from fuse_cache.server.admission import Admitted
from fuse_cache.server.cache.answers import Found
from fuse_cache.server.cache.facts import decode_facts
from fuse_cache.server.cache.store import Store
from fuse_cache.server.compiler import Compiler, Order
from fuse_cache.server.errors import BusyError, DamagedUploadError, InvalidRequestError, UnavailableError
from fuse_cache.server.fetch import Grants
from fuse_cache.server.jobs import Failure, Job, Jobs, Priority, State
from fuse_cache.server.lookup import inline_content
from fuse_cache.server.metrics import Metrics
from fuse_cache.server.pace import Pace
from fuse_cache.server.spool import Upload
from fuse_cache.server.workfolder import WorkFolder

HEARTBEAT_S = 0.8  # The promise is one event a second.
MIN_INTERVAL_S = (
    0.05  # Between two progress events: a pass that takes a microsecond needs no event of its own.
)

Send = Callable[[CompileEvent], Awaitable[None]]


class Receive(Protocol):
    """Returns the next message of the caller, or None when there is no more."""

    def __call__(self) -> Awaitable[CompileRequest | None]: ...


class Follower:
    """Follows jobs for the calls of `Compile` and `Wait`."""

    def __init__(
        self,
        *,
        jobs: Jobs,
        compiler: Compiler,
        store: Store,
        work: WorkFolder,
        grants: Grants,
        metrics: Metrics,
    ) -> None:
        self._jobs = jobs
        self._compiler = compiler
        self._store = store
        self._work = work
        self._grants = grants
        self._metrics = metrics

    async def compile(
        self,
        admitted: Admitted,
        *,
        priority: Priority,
        graph_bytes: int,
        inline_limit: int,
        send: Send,
        receive: Receive,
    ) -> None:
        """Answer one `Compile` to its end.

        Raises:
            RequestError: the call ends with that status; the job, if it goes on, goes on.
        """
        key, namespace = admitted.key.digest(), admitted.key.namespace
        failure = self._jobs.remembered(key, namespace)
        if failure is not None:
            await self._send_failed(key, failure, send)
            return
        if self._jobs.find(key) is None and not self._jobs.has_room():
            raise BusyError("QUEUE_FULL", "the queue for compilations is full", retry_after_s=2.0)
        job = self._jobs.join(key, f"{key.hex()[:12]}-{uuid.uuid4().hex[:8]}", priority, namespace)
        turn = _Turn(self, job, admitted, graph_bytes, send, receive)
        with _Listening(self._jobs, self._metrics, job, can_send=True) as listening:
            # After joining: whoever finished before we joined has published before, so this finds it.
            found = await self._store.get_manifest(key) if job.state is State.WANTED else None
            if found is not None and await self._send_done(key, namespace, found, inline_limit, send):
                return
            await self._follow(job, listening, inline_limit, send, turn)

    async def wait(self, key: bytes, namespace: str, *, inline_limit: int, send: Send) -> None:
        """Answer one `Wait` to its end."""
        job = self._jobs.find(key)
        if job is not None and job.namespace == namespace:
            with _Listening(self._jobs, self._metrics, job, can_send=False) as listening:
                if await self._follow(job, listening, inline_limit, send, None):
                    return
        # Nothing runs, or nothing any more: whoever was to send the graph left, perhaps with a stored answer.
        failure = self._jobs.remembered(key, namespace)
        if failure is not None:
            await self._send_failed(key, failure, send)
            return
        found = await self._store.get_manifest(key)
        if found is not None and _namespace_of(found) != namespace:
            found = None
        if found is None or not await self._send_done(key, namespace, found, inline_limit, send):
            await send(CompileEvent(key=key, unknown=True))

    async def _follow(
        self, job: Job, listening: _Listening, inline_limit: int, send: Send, turn: _Turn | None
    ) -> bool:
        """Follow a job to its end and answer; tell whether it had one.

        One that is abandoned has none: only who cannot send its graph sees that.
        """
        while not job.finished:
            listening.changed.clear()
            if turn is not None and job.state is State.WANTED and job.uploader is None:
                await turn.upload()
                continue
            await send(snapshot(job, self._jobs))
            await listening.next_change()
        if job.failure is not None:
            await self._send_failed(job.key, job.failure, send)
            return True
        if job.result is None:
            return False
        done = Done(was_stored=False)
        done.manifest.ParseFromString(job.result.signed_manifest)
        if len(job.result.inline_content) <= min(inline_limit, INLINE_BYTES):
            done.inline_content = job.result.inline_content
        self._grants.add(job.namespace, job.result.content_digest)
        await send(CompileEvent(key=job.key, done=done))
        return True

    async def _send_done(
        self, key: bytes, namespace: str, found: Found, inline_limit: int, send: Send
    ) -> bool:
        """Answer what is stored; False, and nothing sent: its content turned out to be lost or damaged."""
        content = await inline_content(self._store, found, min(inline_limit, INLINE_BYTES))
        if content is None:
            return False
        done = Done(manifest=SignedManifest.FromString(found.data), was_stored=True)
        self._grants.add(namespace, found.meta.content)
        self._metrics.hot.seconds_saved += found.meta.cost_s
        done.inline_content = content
        await send(CompileEvent(key=key, done=done))
        return True

    async def _send_failed(self, key: bytes, failure: Failure, send: Send) -> None:
        if failure.refused:
            raise InvalidRequestError(failure.reason, failure.message)
        if failure.reason == "DRAINING":
            raise UnavailableError(failure.reason, failure.message)
        failed = Failed(
            reason=_reason(failure.reason),
            stage=failure.stage,
            message=failure.message,
            deterministic=failure.deterministic,
            retry_after_s=failure.retry_after_s,
        )
        await send(CompileEvent(key=key, failed=failed))


class _Turn:
    """One caller's turn to send the graph."""

    def __init__(
        self,
        follower: Follower,
        job: Job,
        admitted: Admitted,
        graph_bytes: int,
        send: Send,
        receive: Receive,
    ) -> None:
        self._follower = follower
        self._job = job
        self._admitted = admitted
        self._graph_bytes = graph_bytes
        self._send = send
        self._receive = receive

    async def upload(self) -> None:
        """Ask for the graph and take it. Whatever goes wrong, the next caller gets a turn."""
        follower, job, admitted = self._follower, self._job, self._admitted
        job.uploader = self
        try:
            upload = Upload(
                follower._work, digest=admitted.request.graph_digest, size_bytes=self._graph_bytes
            )
            try:
                await self._send(CompileEvent(key=job.key, need_graph=True))
                last, pace = False, Pace()
                while not last:
                    last = await self._take_chunk(upload, pace)
                if job.state is State.WANTED:  # Else it was ended meanwhile: draining.
                    order = Order(
                        key=admitted.key,
                        request=admitted.request,
                        request_bytes=admitted.request_bytes,
                        epoch=admitted.epoch,
                        builder=admitted.builder,
                        model=admitted.model,
                    )
                    follower._compiler.take(job, upload, order)
            finally:
                await upload.close()
        finally:
            if job.uploader is self:
                job.uploader = None
                follower._jobs.changed(job)

    async def _take_chunk(self, upload: Upload, pace: Pace) -> bool:
        message = await pace.wait(self._next_message())
        if message is None:
            raise DamagedUploadError("DIGEST_MISMATCH", "the stream ended before the last chunk")
        if message.WhichOneof("message") != "chunk":
            raise InvalidRequestError("REQUEST_MALFORMED", "a chunk of the graph was expected")
        chunk = message.chunk
        pace.received(len(chunk.data))
        await upload.add(chunk.data, chunk.offset, last=chunk.last)
        return chunk.last

    async def _next_message(self) -> CompileRequest | None:
        """Receive, and give signs of life meanwhile."""
        receiving = asyncio.ensure_future(self._receive())
        try:
            while not (await asyncio.wait({receiving}, timeout=HEARTBEAT_S))[0]:
                await self._send(snapshot(self._job, self._follower._jobs))
            return receiving.result()
        finally:
            receiving.cancel()


class _Listening:
    """Hears of a job's changes while the block lasts. `can_send`: for a caller who has the graph."""

    def __init__(self, jobs: Jobs, metrics: Metrics, job: Job, *, can_send: bool) -> None:
        self._jobs = jobs
        self._can_send = can_send
        self._metrics = metrics
        self._job = job
        self.changed = asyncio.Event()

    async def next_change(self) -> None:
        """Wait for a change that is worth an event, or until a sign of life is due.

        The end of the job is told at once, progress at most every MIN_INTERVAL_S.
        """
        began_s = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEARTBEAT_S):
                await self.changed.wait()
        while not self._job.finished and (rest_s := began_s + MIN_INTERVAL_S - time.monotonic()) > 0:
            self.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest_s):
                    await self.changed.wait()

    def __enter__(self) -> _Listening:
        self._jobs.listen(self._job, self.changed.set, can_send=self._can_send)
        self._metrics.waiting.inc()
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.waiting.dec()
        self._jobs.leave(self._job, self.changed.set)


def snapshot(job: Job, jobs: Jobs) -> CompileEvent:
    """Return the event that says where a job is now."""
    if job.state is State.RUNNING:
        seconds = time.monotonic() - job.since_s
        compiling = Compiling(stage=job.stage or "start", detail=job.detail, seconds=seconds)
        return CompileEvent(key=job.key, compiling=compiling)
    return CompileEvent(key=job.key, queued=Queued(position=jobs.position(job)))


def _reason(name: str) -> ErrorReason.ValueType:
    try:
        return ErrorReason.Value(f"ERROR_REASON_{name}")
    except ValueError:
        return ErrorReason.ERROR_REASON_COMPILE_FAILED  # A name of a worker newer than the wire.


def _namespace_of(found: Found) -> str:
    facts = decode_facts(found.meta.facts)
    return "" if facts is None else facts.namespace
