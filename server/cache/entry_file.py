"""The form of one stored file: a header that says everything about it, then the bytes.

The index can be rebuilt from these files alone. Layout (little-endian), format 1:

    magic (8) | space (1) | name (32) | data size (8) | data digest (32, BLAKE3) | meta size (4) | meta |
    checksum (16) | data

The checksum is BLAKE3 over all before it. The data digest of a content is its name.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import BinaryIO

from blake3 import blake3

from fuse_cache.server.cache.tier import NAME_BYTES, Entry, Meta, Space

MAGIC = b"fcentry1"
_FIXED = struct.Struct("<8s1s32sQ32sI")
_CHECKSUM_BYTES = 16
_COST = struct.Struct("<dB")  # compile seconds; 1 when a content digest follows
MAX_META_BYTES = 1 << 20  # Facts are some hundred bytes; a damaged length must not make us read gigabytes.


class DamagedFileError(Exception):
    """The file is not what was written under this name. The text says how."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says about itself."""

    space: Space
    name: bytes
    data_bytes: int
    data_digest: bytes
    meta: Meta
    header_bytes: int

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + self.data_bytes


def encode_meta(meta: Meta) -> bytes:
    return _COST.pack(meta.cost_s, bool(meta.content)) + meta.content + meta.facts


def decode_meta(data: bytes) -> Meta:
    """Raises: DamagedFileError."""
    try:
        cost_s, has_content = _COST.unpack_from(data)
    except struct.error as error:
        raise DamagedFileError("meta is too short") from error
    at = _COST.size + (NAME_BYTES if has_content else 0)
    return Meta(cost_s=cost_s, content=data[_COST.size : at], facts=data[at:])


def seal_meta(meta: Meta) -> bytes:
    """Return the meta as an index row keeps it: with a checksum, for SQLite has none."""
    data = encode_meta(meta)
    return data + blake3(data).digest()[:_CHECKSUM_BYTES]


def open_meta(data: bytes) -> Meta:
    """Read what `seal_meta` made. Raises: DamagedFileError."""
    meta, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if blake3(meta).digest()[:_CHECKSUM_BYTES] != checksum:
        raise DamagedFileError("meta checksum differs")
    return decode_meta(meta)


def encode_header(space: Space, name: bytes, entry: Entry) -> bytes:
    digest = name if space is Space.CONTENT else blake3(entry.data).digest()
    meta = encode_meta(entry.meta)
    head = _FIXED.pack(MAGIC, space.value, name, len(entry.data), digest, len(meta)) + meta
    return head + blake3(head).digest()[:_CHECKSUM_BYTES]


def read_header(file: BinaryIO) -> Header:
    """Read the header and leave the file at its data. Raises: DamagedFileError, OSError."""
    fixed = file.read(_FIXED.size)
    try:
        magic, space, name, data_bytes, digest, meta_bytes = _FIXED.unpack(fixed)
    except struct.error as error:
        raise DamagedFileError(f"header is {len(fixed)} bytes long") from error
    if magic != MAGIC:
        raise DamagedFileError("not an entry file of format 1")
    if meta_bytes > MAX_META_BYTES:
        raise DamagedFileError(f"meta of {meta_bytes} bytes")
    rest = file.read(meta_bytes + _CHECKSUM_BYTES)
    meta, checksum = rest[:meta_bytes], rest[meta_bytes:]
    if blake3(fixed + meta).digest()[:_CHECKSUM_BYTES] != checksum:
        raise DamagedFileError("header checksum differs")
    return Header(Space(space), name, data_bytes, digest, decode_meta(meta), len(fixed) + len(rest))


def read_entry(file: BinaryIO, space: Space, name: bytes, tier: str) -> Entry:
    """Read a whole file that should hold this entry.

    A manifest's digest is checked here. A content's is not: its digest is its name, and `VerifiedTier`, which
    checks that for every tier, would hash 64 MiB a second time.

    Raises:
        DamagedFileError: torn, changed, or the file of another name.
        OSError: it could not be read.
    """
    header = read_header(file)
    if header.space is not space or header.name != name:
        raise DamagedFileError("the file is another entry's")
    start = file.tell()
    data_bytes = file.seek(0, os.SEEK_END) - start
    if data_bytes != header.data_bytes:  # Before reading: a header may promise more than there is memory.
        raise DamagedFileError(f"{data_bytes} bytes of {header.data_bytes}")
    file.seek(start)
    data = file.read(data_bytes)
    if len(data) != data_bytes:
        raise DamagedFileError(f"{len(data)} bytes of {data_bytes}: it was cut off meanwhile")
    if space is Space.MANIFEST and blake3(data).digest() != header.data_digest:
        raise DamagedFileError("data digest differs")
    return Entry(data, header.meta, tier)
