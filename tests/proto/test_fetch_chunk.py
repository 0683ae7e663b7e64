"""Chunks written and read by hand are protobuf's own messages."""

from __future__ import annotations

import pytest

from fuse_cache.proto.compile_pb2 import FetchChunk
from fuse_cache.proto.errors import ContentError
from fuse_cache.proto.fetch_chunk import chunk_data, encode_chunk
from fuse_cache.proto.limits import CHUNK_BYTES


@pytest.mark.parametrize("size", [1, 127, 128, 16_383, 16_384, CHUNK_BYTES])
@pytest.mark.parametrize("offset", [0, CHUNK_BYTES, 1 << 40])
def test_a_chunk_has_the_bytes_that_protobuf_would_write(size: int, offset: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    message = encode_chunk(memoryview(data)[:size], offset=offset, size_bytes=offset + size)
    expected = FetchChunk(data=data[:size], offset=offset, size_bytes=offset + size)
    assert message == expected.SerializeToString(deterministic=True)
    assert chunk_data(message) == data[:size]


def test_fields_in_another_order_are_read_too() -> None:
    message = FetchChunk(offset=512).SerializeToString() + FetchChunk(data=b"content").SerializeToString()
    assert chunk_data(message) == b"content"


@pytest.mark.parametrize(
    "message",
    [b"\x0a", b"\x0a\x05abcd", b"\x0a" + b"\xff" * 11, b"\x0a\xff\xff\xff\xff\x7f", b"\xff", b"\x0b\x01"],
)
def test_what_is_no_chunk_is_refused(message: bytes) -> None:
    with pytest.raises(ContentError, match="no chunk"):
        chunk_data(message)


def test_an_empty_message_has_no_data() -> None:
    assert chunk_data(b"") == b""
