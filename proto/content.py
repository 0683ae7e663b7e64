"""Content by digest: BLAKE3 over all of it and over each chunk, so that a reader keeps no chunk it has not
checked."""

from __future__ import annotations

from blake3 import blake3

from fuse_cache.proto.artifact_pb2 import Content
from fuse_cache.proto.errors import ContentError
from fuse_cache.proto.limits import CHUNK_BYTES, CONTENT_BYTES

__all__ = ["ContentError", "ContentVerifier", "content_digest", "describe_content", "verify_content"]


def content_digest(data: bytes) -> bytes:
    """Return the 32 bytes that name this content."""
    return blake3(data).digest()


def describe_content(data: bytes) -> Content:
    """Return the digests and the size of `data`.

    Raises:
        ContentError: it is empty or larger than CONTENT_BYTES.
    """
    if not 0 < len(data) <= CONTENT_BYTES:
        raise ContentError(f"content of {len(data)} bytes; 1 to {CONTENT_BYTES} are allowed")
    view = memoryview(data)
    chunks = [blake3(view[at : at + CHUNK_BYTES]).digest() for at in range(0, len(data), CHUNK_BYTES)]
    return Content(
        digest=content_digest(data), size_bytes=len(data), chunk_bytes=CHUNK_BYTES, chunk_digests=chunks
    )


def verify_content(content: Content, data: bytes) -> None:
    """Make sure that `data` is the whole content. Faster than feeding it chunk by chunk.

    Raises:
        ContentError: it is not.
    """
    _check(content)
    if len(data) != content.size_bytes:
        raise ContentError(f"{len(data)} bytes instead of {content.size_bytes}")
    if content_digest(data) != content.digest:
        raise ContentError("the content does not fit its digest")


class ContentVerifier:
    """Takes the chunks of one content in order and checks each before it is kept. Not thread-safe.

    After a broken stream, ask for the rest from `offset`: it is always a multiple of the chunk size.
    """

    def __init__(self, content: Content) -> None:
        """Raises ContentError when the description itself is malformed."""
        _check(content)
        self._content = content
        self._kept: list[bytes | memoryview] = []
        self.offset = 0

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return self.offset == self._content.size_bytes

    def feed(self, chunk: bytes | memoryview) -> None:
        """Take the next chunk, whole as `chunk_digests` has it. What is behind a view must not change.

        Raises:
            ContentError: it is not that chunk. What was kept before it stays good.
        """
        number = len(self._kept)
        if number == len(self._content.chunk_digests):
            raise ContentError("a chunk after the last one")
        expected = min(CHUNK_BYTES, self._content.size_bytes - self.offset)
        if len(chunk) != expected:
            raise ContentError(f"chunk {number} has {len(chunk)} bytes instead of {expected}")
        if blake3(chunk).digest() != self._content.chunk_digests[number]:
            raise ContentError(f"chunk {number} does not fit its digest")
        self._kept.append(chunk)
        self.offset += expected

    def join(self) -> bytes:
        """Return the whole content, known by its chunks alone.

        Enough where one signature covers their digests and the whole's.

        Raises:
            ContentError: chunks are missing.
        """
        if not self.complete:
            raise ContentError(f"{self.offset} bytes of {self._content.size_bytes}")
        return b"".join(self._kept)

    def finish(self) -> bytes:
        """Return the whole content.

        Raises:
            ContentError: chunks are missing, or the whole does not fit its digest.
        """
        data = self.join()
        if content_digest(data) != self._content.digest:
            raise ContentError("the content does not fit its digest")
        return data


def _check(content: Content) -> None:
    if content.chunk_bytes != CHUNK_BYTES:
        raise ContentError(f"chunks of {content.chunk_bytes} bytes; this side reads {CHUNK_BYTES}")
    if not 0 < content.size_bytes <= CONTENT_BYTES:
        raise ContentError(f"content of {content.size_bytes} bytes; 1 to {CONTENT_BYTES} are allowed")
    if len(content.chunk_digests) != -(-content.size_bytes // CHUNK_BYTES):
        raise ContentError(f"{len(content.chunk_digests)} chunk digests for {content.size_bytes} bytes")
    if len(content.digest) != 32 or any(len(digest) != 32 for digest in content.chunk_digests):
        raise ContentError("a digest is not 32 bytes")
