"""Streams content in chunks, with memory bounded whatever the readers do."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass

from fuse_cache.proto.compile_pb2 import FetchChunk, FetchRequest
from fuse_cache.proto.limits import CHUNK_BYTES
from fuse_cache.server.admission import check_digest, check_namespace
from fuse_cache.server.cache.store import Store
from fuse_cache.server.errors import BusyError, NotFoundError, OutOfRangeError
from fuse_cache.server.metrics import Metrics

# Of content that streams hold open, each content counted once: what eight slow readers of different 64 MiB
# contents need must fit, with the transport's own buffers, into 256 MiB above the memory tier; so three at a
# time, and the rest of such readers wait for their turn.
OPEN_BYTES = 192 << 20
TURN_S = 20.0  # How long a reader waits for its turn before it is told to come again.
GRANTS = 65536  # (namespace, content) pairs of 100 bytes.


class Grants:
    """Which namespace may read which content: those whose manifests named it. The latest are remembered."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        self._scan = asyncio.Lock()  # One listing of the store at a time.

    def add(self, namespace: str, digest: bytes) -> None:
        """Note that a manifest of this namespace names this content."""
        self._known[namespace, digest] = None
        self._known.move_to_end((namespace, digest))
        if len(self._known) > GRANTS:
            self._known.popitem(last=False)

    async def allow(self, namespace: str, digest: bytes) -> bool:
        """Tell whether a manifest of this namespace names this content.

        Lists the store if it is not remembered.
        """
        if (namespace, digest) in self._known:
            return True
        async with self._scan:
            async for info in self._store.iterate():
                if info.content_digest == digest and info.facts.namespace == namespace:
                    self.add(namespace, digest)
                    return True
        return False


@dataclass(slots=True)
class _Open:
    data: bytes
    readers: int


class ContentStreams:
    """Gives out content chunk by chunk. Streams of one content share one copy of it."""

    def __init__(self, store: Store, grants: Grants, metrics: Metrics) -> None:
        self._store = store
        self._grants = grants
        self._metrics = metrics
        self._open: dict[bytes, _Open] = {}
        self._open_bytes = 0
        self._freed = asyncio.Condition()

    async def chunks(self, request: FetchRequest) -> AsyncIterator[FetchChunk]:
        """Yield the content from the offset on. The next chunk is made when the one before has been sent.

        Raises:
            InvalidRequestError: malformed.
            OutOfRangeError: the offset is not the start of one of its chunks.
            NotFoundError: evicted, or never in this namespace.
            BusyError: other readers hold all the memory there is for this.
        """
        check_namespace(request.namespace)
        check_digest("content_digest", request.content_digest)
        if request.offset % CHUNK_BYTES:
            raise OutOfRangeError("REQUEST_MALFORMED", f"offset must be a multiple of {CHUNK_BYTES}")
        if not await self._grants.allow(request.namespace, request.content_digest):
            raise _not_found()
        async with self._opened(request.content_digest) as data:
            size_bytes = len(data)
            if request.offset >= size_bytes:
                raise OutOfRangeError(
                    "REQUEST_MALFORMED", f"offset is {request.offset}, the content has {size_bytes} bytes"
                )
            for offset in range(request.offset, size_bytes, CHUNK_BYTES):
                chunk = data[offset : offset + CHUNK_BYTES]
                self._metrics.bytes_sent.labels("fetch").inc(len(chunk))
                yield FetchChunk(data=chunk, offset=offset, size_bytes=size_bytes)

    @contextlib.asynccontextmanager
    async def _opened(self, digest: bytes) -> AsyncIterator[bytes]:
        opened = self._open.get(digest)
        if opened is None:
            await self._turn()
            found = await self._store.get_content(digest)
            if found is None:
                raise _not_found()
            # Another reader may have opened it while we read; its copy is as good, and ours is let go.
            opened = self._open.setdefault(digest, _Open(found.data, 0))
            if opened.readers == 0:
                self._open_bytes += len(opened.data)
        opened.readers += 1
        try:
            yield opened.data
        finally:
            opened.readers -= 1
            if opened.readers == 0:
                del self._open[digest]
                self._open_bytes -= len(opened.data)
                async with self._freed:
                    self._freed.notify_all()

    async def _turn(self) -> None:
        """Wait until there is room for one more content. One larger than all the room goes alone."""
        try:
            async with asyncio.timeout(TURN_S), self._freed:
                await self._freed.wait_for(lambda: self._open_bytes < OPEN_BYTES)
        except TimeoutError:
            raise BusyError(
                "QUOTA", "slow readers hold all the memory for streams; fetch again later", retry_after_s=2.0
            ) from None


def _not_found() -> NotFoundError:
    return NotFoundError("UNSPECIFIED", "no such content in this namespace: look up again")
