"""Graphs on their way in: straight to files, hashed as they come, so that memory does not grow with what is
sent.

Sixty-four uploads of the largest graph hold 64 chunks in memory, 32 MiB, and the rest on disk within a
budget.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import tempfile
import uuid
from io import FileIO
from pathlib import Path

from blake3 import blake3

from fuse_cache.proto.graph_format import DIGEST_CONTEXT
from fuse_cache.proto.limits import CHUNK_BYTES, GRAPH_LIMITS
from fuse_cache.server.errors import BusyError, DamagedUploadError, InvalidRequestError

SPOOL_BYTES = 1 << 30  # 128 graphs of the largest size, or 7,000 of the largest seen in practice.
INLINE_WRITE_BYTES = 64 * 1024  # Into the page cache in 30 us: less than the hop to a thread and back.
_LOCK = "lock"


class WorkFolder:
    """The daemon's private scratch folder.

    One of its own per daemon; those of dead daemons are swept away at start.
    """

    def __init__(self, base: Path) -> None:
        """Make the folder below `base`.

        Raises:
            OSError: it cannot be made, or belongs to somebody else.
        """
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = os.lstat(base)
        if info.st_uid != os.getuid() or base.is_symlink():
            raise PermissionError(f"{base} belongs to another user; set work_dir to a folder of your own")
        self.base = base
        self._sweep()
        self.path = Path(tempfile.mkdtemp(prefix="daemon-", dir=base))
        self._lock_fd = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        self._spooled_bytes = 0

    def _sweep(self) -> None:
        for folder in self.base.glob("daemon-*"):
            try:
                fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                continue  # Being made just now, or not ours.
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            except BlockingIOError:
                pass  # Its daemon lives.
            finally:
                os.close(fd)

    def new_folder(self, kind: str) -> Path:
        """Make an empty private folder."""
        path = self.path / f"{kind}-{uuid.uuid4().hex[:16]}"
        path.mkdir(mode=0o700)
        return path

    def reserve(self, size_bytes: int) -> None:
        """Take a part of the spool's budget.

        Raises:
            BusyError: it is used up for now.
        """
        if self._spooled_bytes + size_bytes > SPOOL_BYTES:
            raise BusyError("QUOTA", "too many graphs are waiting on this daemon's disk", retry_after_s=2.0)
        self._spooled_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """Give a part of the budget back."""
        self._spooled_bytes -= size_bytes

    async def remove(self, folder: Path) -> None:
        """Remove a folder that `new_folder` made, off the event loop."""
        await asyncio.to_thread(shutil.rmtree, folder, True)

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)


class Upload:
    """One graph that is being received into `<folder>/graph`. Close it; a whole one keeps its folder."""

    def __init__(self, work: WorkFolder, *, digest: bytes, size_bytes: int) -> None:
        """Prepare for `size_bytes` bytes with this graph digest.

        Raises:
            InvalidRequestError: more than a graph may have.
            BusyError: no room in the spool.
        """
        if not 0 < size_bytes <= GRAPH_LIMITS.size_bytes:
            raise InvalidRequestError(
                "GRAPH_TOO_LARGE", f"graph_bytes is {size_bytes}, the limit is {GRAPH_LIMITS.size_bytes}"
            )
        work.reserve(size_bytes)
        self._work = work
        self._digest = digest
        self._size_bytes = size_bytes
        self._received_bytes = 0
        self._hasher = blake3(derive_key_context=DIGEST_CONTEXT)
        self._kept = False
        self.folder = work.new_folder("job")
        self._file = FileIO(self.folder / "graph", "xb")

    async def add(self, data: bytes, offset: int, *, last: bool) -> None:
        """Take the next chunk.

        Raises:
            InvalidRequestError: it is out of order or too large.
            DamagedUploadError: it was the last one and the whole is not what was announced.
        """
        if offset != self._received_bytes:
            raise InvalidRequestError(
                "REQUEST_MALFORMED", f"chunk.offset is {offset}, expected {self._received_bytes}"
            )
        if len(data) > CHUNK_BYTES or (not data and not last):
            raise InvalidRequestError(
                "REQUEST_MALFORMED", f"chunk.data has {len(data)} bytes; send 1 to {CHUNK_BYTES}"
            )
        self._received_bytes += len(data)
        if self._received_bytes > self._size_bytes:
            raise DamagedUploadError("DIGEST_MISMATCH", f"more than the {self._size_bytes} bytes announced")
        if len(data) <= INLINE_WRITE_BYTES:
            self._take(data)
        else:
            await asyncio.to_thread(self._take, data)
        if last:
            if self._received_bytes != self._size_bytes:
                raise DamagedUploadError(
                    "DIGEST_MISMATCH", f"{self._received_bytes} bytes came, {self._size_bytes} were announced"
                )
            if self._hasher.digest() != self._digest:
                raise DamagedUploadError(
                    "DIGEST_MISMATCH", "the bytes that came do not have the announced graph_digest"
                )

    def keep(self) -> Path:
        """Close the file and leave the folder to the caller, who also releases the budget (`size_bytes`)."""
        self._file.close()
        self._kept = True
        return self.folder

    @property
    def size_bytes(self) -> int:
        """The announced size: what the budget holds for it."""
        return self._size_bytes

    async def close(self) -> None:
        """Throw away an upload that was not kept."""
        if not self._kept:
            self._kept = True
            self._file.close()
            self._work.release(self._size_bytes)
            await self._work.remove(self.folder)

    def _take(self, data: bytes) -> None:
        self._hasher.update(data)
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
