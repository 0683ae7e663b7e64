"""Seeds: precompiled headers per toolchain and target that workers start from, made once and then only read.

Without one, a first compilation spends 6 to 10 s on a header; with one, a link.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path

from blake3 import blake3

from fuse_cache.server.epoch import Epoch
from fuse_cache.server.worker.pool import WorkerError, WorkerPool
from fuse_cache.server.worker.protocol import write_seed_job
from fuse_cache.server.workfolder import WorkFolder

log = logging.getLogger(__name__)

_COMPLETE = "complete"
_LOCK = "lock"  # Shared by the daemons that use the seed, exclusive for whoever removes it.
RETRY_S = 60.0  # After a failure: it may have been the machine's, and each compilation without costs 10 s.


class Seeds:
    """Knows the seed folder of each target, and has the missing ones made by a worker."""

    def __init__(
        self,
        base: Path,
        work: WorkFolder,
        pool: WorkerPool,
        entry: str,
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep seeds below `base`. `entry` is the `module:function` that makes one; "" turns seeds off."""
        self._base = base
        self._work = work
        self._pool = pool
        self._entry = entry
        self._now_s = now_s
        self._locks: dict[Path, int] = {}  # Descriptors that hold the seeds we use, until `close`.
        self._tasks: dict[Path, asyncio.Task[Path | None]] = {}
        self._failed_s: dict[Path, float] = {}  # When making one failed last.

    async def ready(self, epoch: Epoch, target: str) -> Path | None:
        """Return the seed folder of a target, made now if need be; None: compile without."""
        if not self._entry:
            return None
        folder = self._folder(epoch, target)
        if folder not in self._tasks or self._is_due(folder):
            self._tasks[folder] = asyncio.create_task(self._make(folder, target))
        return await asyncio.shield(self._tasks[folder])

    def _folder(self, epoch: Epoch, target: str) -> Path:
        facts = epoch.toolchain.torch_fingerprint, epoch.header_sources, epoch.cxx.encode(), target.encode()
        return self._base / blake3(b"\0".join(facts)).hexdigest()[:16]

    def _is_due(self, folder: Path) -> bool:
        """Tell whether one that could not be made is worth another try."""
        failed_s = self._failed_s.get(folder)
        return failed_s is not None and self._now_s() - failed_s >= RETRY_S and self._tasks[folder].done()

    async def close(self) -> None:
        """Stop making, and let go of the seeds: their workers have ended."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for descriptor in self._locks.values():
            os.close(descriptor)
        self._locks.clear()

    def sweep(self, epochs: Collection[Epoch], targets: Collection[str]) -> None:
        """Remove seeds that no living daemon holds, but those of `epochs` and `targets`. Blocking.

        Each has 150 MB, and every upgrade of torch or of the compiler makes new ones.
        """
        ours = {self._folder(epoch, target) for epoch in epochs for target in targets}
        for folder in self._base.glob("*"):
            if folder in ours or folder in self._locks:
                continue
            try:
                descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError:
                continue  # Not ours, or gone.
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            except BlockingIOError:
                pass  # A daemon uses it.
            finally:
                os.close(descriptor)

    def _hold(self, folder: Path) -> None:
        """Keep `folder`, made if need be, from every sweep. Blocking for as long as one removes it.

        Raises:
            OSError: it cannot be made.
        """
        while folder not in self._locks:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                continue  # Swept away in between.
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            with contextlib.suppress(FileNotFoundError):
                if os.stat(folder / _LOCK).st_ino == os.fstat(descriptor).st_ino:
                    self._locks[folder] = descriptor
                    return
            os.close(descriptor)  # Of a folder that was swept away while we waited for it.

    async def _make(self, folder: Path, target: str) -> Path | None:
        try:
            await asyncio.to_thread(self._hold, folder)
        except OSError as error:
            self._failed(folder, target, error)
            return None
        if (folder / _COMPLETE).exists():
            return folder
        job_folder = self._work.new_folder("seed")
        try:
            write_seed_job(job_folder, entry=self._entry, seed_dir=folder, target=target)
            await self._pool.run(job_folder.name, job_folder, lambda stage, detail: None)
            (folder / _COMPLETE).touch()
        except (WorkerError, OSError) as error:
            self._failed(folder, target, error)
            return None
        finally:
            await self._work.remove(job_folder)
        self._failed_s.pop(folder, None)
        return folder

    def _failed(self, folder: Path, target: str, error: Exception) -> None:
        """Note that there is none. A compilation makes its own header then: slower, not wrong."""
        self._failed_s[folder] = self._now_s()
        log.warning("no seed", extra={"target": target, "why": str(error)[:500]})
