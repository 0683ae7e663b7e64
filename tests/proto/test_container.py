from __future__ import annotations

import random
import resource
import struct

import pytest
import zstandard
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from fuse_cache.proto.container import ContainerError, pack, unpack
from fuse_cache.proto.limits import CONTAINER_SECTIONS, CONTAINER_SMALL_BYTES

SECTIONS = {
    "wrapper": b"def call(args):\n    return args\n" * 50,
    "so/" + "ab" * 32: random.Random(1).randbytes(3000),
    "empty": b"",
    "spec": b"\x00\x01",
}
NAMES = st.from_regex(r"[a-z0-9][a-z0-9_/-]{0,20}", fullmatch=True)


Entry = tuple[str, int, int, int, bytes]


def directory_of(*entries: Entry, body: bytes = b"", count: int | None = None) -> bytes:
    """Return a container with a directory as given: name, codec, raw bytes, stored bytes, digest."""
    directory = struct.pack("<I", len(entries) if count is None else count)
    for name, codec, raw, stored, digest in entries:
        directory += struct.pack("<H", len(name)) + name.encode()
        directory += struct.pack("<BQQ32s", codec, raw, stored, digest)
    return b"FCC\x01" + struct.pack("<I32s", len(directory), blake3(directory).digest()) + directory + body


@given(st.dictionaries(NAMES, st.binary(max_size=200), max_size=5))
def test_sections_come_back(sections: dict[str, bytes]) -> None:
    assert unpack(pack(sections)) == sections


def test_the_order_of_the_mapping_does_not_matter() -> None:
    assert pack(SECTIONS) == pack(dict(reversed(SECTIONS.items())))


def test_text_is_compressed_and_noise_is_not() -> None:
    assert len(pack({"a": b"x = 1\n" * 1000})) < 300
    noise = random.Random(2).randbytes(5000)
    assert len(pack({"a": noise})) < 5000 + 100


def test_every_prefix_and_every_longer_form_is_refused() -> None:
    data = pack(SECTIONS)
    for length in range(len(data)):
        with pytest.raises(ContainerError):
            unpack(data[:length])
    with pytest.raises(ContainerError):
        unpack(data + b"\x00")


def test_every_changed_byte_is_noticed() -> None:
    data = pack(SECTIONS)
    for at in range(len(data)):
        damaged = data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
        with pytest.raises(ContainerError):
            unpack(damaged)


@pytest.mark.parametrize("name", ["", "A", "../a", "a/../b", "/a", "a b", "é", "a\n", "x" * 161])
def test_names_that_could_be_paths_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(ContainerError, match="no name"):
        pack({name: b""})
    entry = (name, 0, 0, 0, blake3(b"").digest())
    with pytest.raises(ContainerError):
        unpack(directory_of(entry))


def test_sections_are_in_order_and_there_once() -> None:
    digest = blake3(b"").digest()
    unpack(directory_of(("a", 0, 0, 0, digest), ("b", 0, 0, 0, digest)))
    for names in (("b", "a"), ("a", "a")):
        with pytest.raises(ContainerError, match="order"):
            unpack(directory_of(*((name, 0, 0, 0, digest) for name in names)))


def test_unknown_codecs_schemas_and_counts_are_refused() -> None:
    digest = blake3(b"").digest()
    with pytest.raises(ContainerError, match="codec 2"):
        unpack(directory_of(("a", 2, 0, 0, digest)))
    with pytest.raises(ContainerError, match="schema"):
        unpack(b"FCC\x02" + pack(SECTIONS)[4:])
    with pytest.raises(ContainerError, match="limit"):
        unpack(directory_of(count=CONTAINER_SECTIONS + 1))
    with pytest.raises(ContainerError):
        unpack(directory_of(count=5))
    with pytest.raises(ContainerError):
        unpack(b"FCC\x01" + struct.pack("<I32s", (1 << 32) - 1, bytes(32)))
    with pytest.raises(ContainerError, match="limit"):
        pack({f"s{number}": b"" for number in range(CONTAINER_SECTIONS + 1)})


def bomb(claimed: int, raw_bytes: int) -> bytes:
    """Return a container whose zstd frame holds `raw_bytes` zeros and whose directory claims `claimed`."""
    body = zstandard.ZstdCompressor(write_content_size=True).compress(bytes(raw_bytes))
    return directory_of(("a", 1, claimed, len(body), blake3(body).digest()), body=body)


def test_a_bomb_is_refused_before_memory_is_taken() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ContainerError, match="limit"):
        unpack(bomb(1 << 40, 1 << 20))
    with pytest.raises(ContainerError, match="two sizes"):
        unpack(bomb(1 << 10, 1 << 20))
    frame = zstandard.ZstdCompressor(write_content_size=True).compress(bytes(10))
    lying = frame[:4] + b"\xe0" + (1 << 45).to_bytes(8, "little") + frame[6:]
    hostile = directory_of(("a", 1, CONTAINER_SMALL_BYTES, len(lying), blake3(lying).digest()), body=lying)
    with pytest.raises(ContainerError):
        unpack(hostile)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_a_frame_without_a_size_or_with_more_behind_it_is_refused() -> None:
    for body in (
        zstandard.ZstdCompressor(write_content_size=False).compress(b"abc" * 50),
        zstandard.ZstdCompressor().compress(b"abc" * 50) + b"more",
    ):
        with pytest.raises(ContainerError, match=r"two sizes|decompressed"):
            unpack(directory_of(("a", 1, 150, len(body), blake3(body).digest()), body=body))


def test_what_pack_makes_unpack_takes_at_any_ratio() -> None:
    zeros = bytes(32 << 20)
    assert unpack(pack({"a": zeros})) == {"a": zeros}
    with pytest.raises(ContainerError, match="limit"):
        pack({"a": bytes(CONTAINER_SMALL_BYTES + 1)})
