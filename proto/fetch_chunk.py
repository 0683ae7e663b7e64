"""FetchChunk, written and read by hand: content passes through it without protobuf's copies.

Protobuf copies the data three times between the store and the wire, and twice on the host; here it is once
and never. The bytes are those of protobuf, and what others encode differently is read by protobuf.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError

from fuse_cache.proto.compile_pb2 import FetchChunk
from fuse_cache.proto.errors import ContentError

_FIELDS: Final = FetchChunk.DESCRIPTOR.fields_by_name
_DATA: Final = _FIELDS["data"].number << 3 | 2
_OFFSET: Final = bytes((_FIELDS["offset"].number << 3,))
_SIZE_BYTES: Final = bytes((_FIELDS["size_bytes"].number << 3,))
_MAX_VARINT_BYTES: Final = 5  # Of a length: protobuf's messages end at 2 GiB.


def varint(value: int) -> bytes:
    """Return a number of at least 0 as protobuf writes it."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_chunk(data: bytes | memoryview, *, offset: int, size_bytes: int) -> bytes:
    """Return a serialised FetchChunk. `data` is not empty."""
    tail = (_OFFSET + varint(offset) if offset else b"") + _SIZE_BYTES + varint(size_bytes)
    return b"".join((bytes((_DATA,)), varint(len(data)), data, tail))


def chunk_data(message: bytes) -> bytes | memoryview:
    """Return the data of a serialised FetchChunk.

    Raises:
        ContentError: it is none.
    """
    if message and message[0] == _DATA:
        size = shift = 0
        for at in range(1, min(len(message), 1 + _MAX_VARINT_BYTES)):
            size |= (message[at] & 127) << shift
            shift += 7
            if message[at] < 128:
                begin = at + 1
                if begin + size <= len(message):
                    return memoryview(message)[begin : begin + size]
                break
    try:
        return FetchChunk.FromString(message).data
    except DecodeError as error:
        raise ContentError("a message of the stream is no chunk") from error
