"""Streams content in chunks, with memory bounded whatever the readers do."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from fuse_cache.proto.compile_pb2 import FetchRequest
from fuse_cache.proto.fetch_chunk import encode_chunk
from fuse_cache.proto.limits import CHUNK_BYTES
from fuse_cache.server.admission import check_digest, check_namespace
from fuse_cache.server.cache.store import Store
from fuse_cache.server.errors import BusyError, NotFoundError, OutOfRangeError
from fuse_cache.server.metrics import Metrics

# Of content that streams hold in memory, each content counted once, before one more is read. With one of 64
# MiB held and one being read, 128 MiB; 256 MiB above the memory tier are allowed, the rest is the
# transport's.
OPEN_BYTES = 64 << 20
STALLED_S = 0.5  # A reader that took no chunk for so long lets go of its content when others need the room.
TURN_S = 20.0  # How long a reader waits for room before it is told to come again.
GRANTS = 65536  # (namespace, content) pairs of 100 bytes.


class Grants:
    """Which namespace may read which content: those whose manifests named it. The latest are remembered."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def add(self, namespace: str, digest: bytes) -> None:
        """Note that a manifest of this namespace names this content."""
        if (namespace, digest) not in self._known:
            self._known[namespace, digest] = None
            if len(self._known) > GRANTS:
                self._known.popitem(last=False)

    async def allow(self, namespace: str, digest: bytes) -> bool:
        """Tell whether a manifest of this namespace names this content.

        The store's index is asked if it is not remembered; a content that is not there costs one look for it.
        """
        if (namespace, digest) in self._known:
            return True
        if namespace not in await self._store.namespaces_of(digest):
            return False
        self.add(namespace, digest)
        return True


@dataclass(slots=True)
class _Open:
    """One content that streams read. `data` None: let go of; it is read again for who moves next."""

    readers: int = 0
    data: bytes | None = None
    moved_s: float = 0.0


class ContentStreams:
    """Gives out content chunk by chunk. Streams of one content share one copy of it."""

    def __init__(self, store: Store, grants: Grants, metrics: Metrics) -> None:
        self._store = store
        self._grants = grants
        self._metrics = metrics
        self._open: dict[bytes, _Open] = {}
        # One content is read at a time, so that many readers do not pass OPEN_BYTES together.
        self._loading = asyncio.Lock()

    async def chunks(self, request: FetchRequest) -> AsyncGenerator[bytes, None]:
        """Yield the content from the offset on, as serialised FetchChunks.

        The next chunk is made when the one before has been sent.

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
        opened = self._open.setdefault(request.content_digest, _Open())
        opened.readers += 1
        try:
            offset, size_bytes = request.offset, CHUNK_BYTES
            while offset == request.offset or offset < size_bytes:
                size_bytes, message = await self._chunk(request.content_digest, opened, offset)
                yield message
                del message  # The transport has a copy of its own.
                self._metrics.hot.fetched_bytes += min(CHUNK_BYTES, size_bytes - offset)
                offset += CHUNK_BYTES
        finally:
            opened.readers -= 1
            if opened.readers == 0:
                self._open.pop(request.content_digest, None)

    async def _chunk(self, digest: bytes, opened: _Open, offset: int) -> tuple[int, bytes]:
        """Return the size of the content and the message with the chunk at `offset`.

        No caller keeps the content itself.
        """
        if opened.data is None:
            async with self._loading:
                if opened.data is None:
                    await self._make_room()
                    found = await self._store.get_content(digest)
                    if found is None:
                        raise _not_found()
                    opened.data = found.data
        data = opened.data
        opened.moved_s = time.monotonic()
        if offset >= len(data):
            raise OutOfRangeError(
                "REQUEST_MALFORMED", f"offset is {offset}, the content has {len(data)} bytes"
            )
        chunk = memoryview(data)[offset : offset + CHUNK_BYTES]
        return len(data), encode_chunk(chunk, offset=offset, size_bytes=len(data))

    async def _make_room(self) -> None:
        """Wait until there is room for one more content. One larger than all the room goes alone."""
        end_s = time.monotonic() + TURN_S
        while self._held_bytes() >= OPEN_BYTES:
            stalled_since_s = time.monotonic() - STALLED_S
            for opened in self._open.values():
                if opened.moved_s < stalled_since_s:
                    opened.data = None
            if self._held_bytes() < OPEN_BYTES:
                return
            if time.monotonic() > end_s:
                raise BusyError(
                    "QUOTA", "readers hold all the memory for streams; fetch again later", retry_after_s=2.0
                )
            await asyncio.sleep(0.05)

    def _held_bytes(self) -> int:
        return sum(len(opened.data) for opened in self._open.values() if opened.data is not None)


def _not_found() -> NotFoundError:
    return NotFoundError("UNSPECIFIED", "no such content in this namespace: look up again")
