"""Graphs on their way in: straight to files, hashed as they come, so that memory does not grow with what is
sent.

Sixty-four uploads of the largest graph hold 64 chunks in memory, 32 MiB, and the rest on disk within a
budget.
"""

from __future__ import annotations

import asyncio
import shutil
from io import FileIO
from pathlib import Path

from blake3 import blake3

from fuse_cache.proto.graph_format import DIGEST_CONTEXT
from fuse_cache.proto.limits import CHUNK_BYTES, GRAPH_LIMITS
from fuse_cache.server.errors import BusyError, DamagedUploadError, InvalidRequestError
from fuse_cache.server.workfolder import WorkFolder

INLINE_WRITE_BYTES = 64 * 1024  # Into the page cache in 30 us: less than the hop to a thread and back.


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
        if not work.reserve(size_bytes):
            raise BusyError("QUOTA", "too many graphs are waiting on this daemon's disk", retry_after_s=2.0)
        self._work = work
        self._digest = digest
        self._size_bytes = size_bytes
        self._received_bytes = 0
        self._hasher = blake3(derive_key_context=DIGEST_CONTEXT)
        self._kept = False
        self._writing: asyncio.Future[None] | None = None  # In a thread, which a cancelled `add` cannot stop.
        folder: Path | None = None
        try:
            self.folder = folder = work.new_folder("job")
            self._file = FileIO(folder / "graph", "xb")
        except OSError as error:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            work.release(size_bytes)
            raise BusyError(
                "QUOTA", f"this daemon cannot spool a graph now: {error.strerror}", retry_after_s=2.0
            ) from error

    async def add(self, data: bytes, offset: int, *, last: bool) -> None:
        """Take the next chunk.

        Raises:
            InvalidRequestError: it is out of order or too large.
            DamagedUploadError: it was the last one and the whole is not what was announced.
            BusyError: the disk is full.
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
            self._writing = asyncio.ensure_future(asyncio.to_thread(self._take, data))
            await asyncio.shield(self._writing)
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
        """Throw away an upload that was not kept. Done to the end even if who waits for it is cancelled."""
        if not self._kept:
            self._kept = True
            await asyncio.shield(asyncio.ensure_future(self._throw_away()))

    async def _throw_away(self) -> None:
        if self._writing is not None:
            # Closed under the thread, its descriptor could be another file's by the time it writes.
            await asyncio.wait({self._writing})
            if not self._writing.cancelled():
                self._writing.exception()  # Of an `add` that nobody waits for any more.
        self._file.close()
        self._work.release(self._size_bytes)
        await self._work.remove(self.folder)

    def _take(self, data: bytes) -> None:
        self._hasher.update(data)
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            raise BusyError(
                "QUOTA", f"this daemon cannot spool a graph now: {error.strerror}", retry_after_s=2.0
            ) from error
