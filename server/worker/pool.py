"""One worker process per compilation: pass on its progress, and make of its end a result or a reason."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from fuse_cache.server.worker.checked import ProtocolError
from fuse_cache.server.worker.link import Ended, Loading, SupervisorLink
from fuse_cache.server.worker.protocol import (
    EXIT_BUILT,
    EXIT_FAILED,
    MAX_EVENT_BYTES,
    BuildFailed,
    Built,
    decode_event,
    read_built,
    read_failure,
)

FULL_DISK_BYTES = 1 << 20  # Less than any compilation writes.
LOG_TAIL_BYTES = 1500  # Of a dead worker's log, in the message to whoever waits.
MAX_EVENT_BUFFER = 64 * MAX_EVENT_BYTES
NOT_READY_S = 0.02  # Between two orders to a supervisor that has no fork server, or a full buffer.
LOAD_PATIENCE_S = 120.0  # A fork server loads in 4 s; on a box that swaps, in 60.


class WorkerError(Exception):
    """A compilation that gave no artifact. `reason` is an ErrorReason without its prefix."""

    reason: str = "INTERNAL"
    deterministic: bool = False

    def __init__(self, message: str, *, stage: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.stage = stage


class WorkerDied(WorkerError):
    """The worker ended without a word."""

    reason: str = "WORKER_DIED"


class WorkerTimeout(WorkerError):
    """The worker took longer than it may, and was killed with all its children."""

    reason: str = "COMPILE_TIMEOUT"


class WorkerOutOfMemory(WorkerError):
    """The worker and its children took more memory than they may, and were killed."""

    reason: str = "OUT_OF_MEMORY"


class WorkersUnavailable(WorkerError):
    """There is no fork server: it would not load."""

    reason: str = "TOOLCHAIN_MISMATCH"


class CompileFailed(WorkerError):
    """The build said itself why it failed."""

    def __init__(self, reason: str, message: str, *, stage: str, deterministic: bool) -> None:
        super().__init__(message, stage=stage)
        self.reason = reason
        self.deterministic = deterministic


class WorkerPool:
    """Runs builds in processes of their own. The caller bounds how many at a time.

    Invariants (tests/server/worker/test_pool.py): whatever happens to a worker, its parent or the supervisor,
    `run` ends, and then no process of that job is left.
    """

    def __init__(
        self, link: SupervisorLink, *, seconds: float, max_bytes: int, max_content_bytes: int
    ) -> None:
        """Bound each build: wall-clock seconds, resident bytes of its process tree, bytes of its artifact."""
        self._link = link
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._max_content_bytes = max_content_bytes

    async def run(self, job_id: str, folder: Path, on_event: Callable[[str, str], None]) -> Built:
        """Build what lies in `folder` (protocol.write_job_files) and return it.

        Raises:
            WorkerError: nothing was built; subclasses and `reason` say why.
        """
        while True:
            loading = await self._link.wait_ready(LOAD_PATIENCE_S)
            if loading is not Loading.READY:
                why = self._link.message or f"not loaded after {LOAD_PATIENCE_S:.0f} s"
                raise WorkersUnavailable(f"no compilation worker: {why}", stage="start")
            progress = _Progress(on_event)
            try:
                ended = await self._run_once(job_id, folder, progress)
            finally:
                progress.close()
            if ended.why != "not_ready":
                return await self._result(folder, ended, progress.stage)
            await asyncio.sleep(NOT_READY_S)

    async def _run_once(self, job_id: str, folder: Path, progress: _Progress) -> Ended:
        write_fd = progress.open()
        try:
            self._link.start_job(
                job_id, str(folder), write_fd, seconds=self._seconds, max_bytes=self._max_bytes
            )
        finally:
            os.close(write_fd)
        try:
            return await self._link.ended(job_id)
        except asyncio.CancelledError:
            self._link.kill(job_id)
            await self._link.ended(job_id)
            raise

    async def _result(self, folder: Path, ended: Ended, stage: str) -> Built:
        if ended.why == "time":
            raise WorkerTimeout(
                f"the compilation took longer than {self._seconds:g} s and was stopped", stage=stage
            )
        if ended.why == "memory":
            limit = f"{self._max_bytes / (1 << 20):.0f} MiB"
            raise WorkerOutOfMemory(
                f"the compilation took more than {limit} of memory and was stopped", stage=stage
            )
        try:
            if ended.code == EXIT_BUILT and not ended.why:
                return await asyncio.to_thread(read_built, folder, max_content_bytes=self._max_content_bytes)
            if ended.code == EXIT_FAILED and not ended.why:
                raise read_failure(folder)
        except BuildFailed as failure:
            raise CompileFailed(
                failure.reason, failure.message, stage=failure.stage, deterministic=failure.deterministic
            ) from failure
        except ProtocolError as error:
            raise WorkerDied(f"the worker's answer cannot be used: {error}", stage=stage) from error
        raise WorkerDied(
            f"the worker {_describe_end(ended)}{_space_left(folder)}{_log_tail(folder)}", stage=stage
        )


class _Progress:
    """The read end of a worker's progress pipe.

    Its end means nothing: a compiler may hold it open for ever.
    """

    def __init__(self, on_event: Callable[[str, str], None]) -> None:
        self._on_event = on_event
        self._read_fd = -1
        self._buffer = b""
        self.stage = "start"

    def open(self) -> int:
        self._read_fd, write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        asyncio.get_running_loop().add_reader(self._read_fd, self._readable)
        return write_fd

    def close(self) -> None:
        if self._read_fd >= 0:
            self._readable()
            asyncio.get_running_loop().remove_reader(self._read_fd)
            os.close(self._read_fd)
            self._read_fd = -1

    def _readable(self) -> None:
        try:
            data = os.read(self._read_fd, MAX_EVENT_BUFFER)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._read_fd)
            return
        *lines, rest = (self._buffer + data).split(b"\n")
        self._buffer = rest[:MAX_EVENT_BYTES]
        for line in lines:
            with contextlib.suppress(ProtocolError):
                self.stage, detail = decode_event(line)
                self._on_event(self.stage, detail)


def _describe_end(ended: Ended) -> str:
    if ended.why == "asked":
        return "was stopped"
    if ended.why == "supervisor":
        return "was lost: its supervisor died"
    if ended.code < 0:
        try:
            return f"was killed by {signal.Signals(-ended.code).name}"
        except ValueError:
            return f"was killed by signal {-ended.code}"
    return f"ended with status {ended.code}"


def _space_left(folder: Path) -> str:
    """Say so when the disk is full under the worker's folder, where its log lies and cannot say it."""
    try:
        left = shutil.disk_usage(folder).free
    except OSError:
        return ""
    if left >= FULL_DISK_BYTES:
        return ""
    return f"; only {left} bytes are left on the disk of the daemon's work folder: make room there"


def _log_tail(folder: Path) -> str:
    try:
        with (folder / "log").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            tail = file.read().decode(errors="replace").strip()
    except OSError:
        return ""
    return f"; the end of its log: {tail}" if tail else ""
