from __future__ import annotations

import random

import pytest

from fuse_cache.proto.artifact_pb2 import Content
from fuse_cache.proto.content import ContentError, ContentVerifier, describe_content, verify_content
from fuse_cache.proto.limits import CHUNK_BYTES, CONTENT_BYTES

DATA = random.Random(1).randbytes(2 * CHUNK_BYTES + 17)


def chunks(data: bytes) -> list[bytes]:
    return [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]


@pytest.mark.parametrize("size", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, len(DATA)])
def test_content_of_any_size_comes_back_chunk_by_chunk(size: int) -> None:
    data = DATA[:size]
    content = describe_content(data)
    assert content.size_bytes == size
    assert len(content.chunk_digests) == len(chunks(data))
    verifier = ContentVerifier(content)
    for chunk in chunks(data):
        assert not verifier.complete
        verifier.feed(chunk)
    assert verifier.complete
    assert verifier.finish() == data
    verify_content(content, data)


def test_a_bad_chunk_is_refused_and_the_good_ones_stay() -> None:
    verifier = ContentVerifier(describe_content(DATA))
    first, second, third = chunks(DATA)
    verifier.feed(first)
    damaged = second[:-1] + bytes([second[-1] ^ 1])
    for bad in (damaged, first, second[:-1], second + b"x", b"", third):
        with pytest.raises(ContentError, match="chunk 1"):
            verifier.feed(bad)
    assert verifier.offset == CHUNK_BYTES
    verifier.feed(second)
    with pytest.raises(ContentError, match="bytes of"):
        verifier.finish()
    with pytest.raises(ContentError, match="bytes of"):
        verifier.join()
    verifier.feed(memoryview(third))
    with pytest.raises(ContentError, match="after the last"):
        verifier.feed(third)
    assert verifier.finish() == verifier.join() == DATA


def test_chunks_that_fit_do_not_hide_a_whole_that_does_not() -> None:
    content = describe_content(DATA)
    content.digest = bytes(32)
    verifier = ContentVerifier(content)
    for chunk in chunks(DATA):
        verifier.feed(chunk)
    with pytest.raises(ContentError, match="the content does not fit"):
        verifier.finish()


def test_verify_content_refuses_what_differs() -> None:
    content = describe_content(DATA)
    for bad in (DATA[:-1], DATA + b"x", DATA[:-1] + bytes([DATA[-1] ^ 1])):
        with pytest.raises(ContentError):
            verify_content(content, bad)


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_bytes": 1024},
        {"chunk_bytes": 0},
        {"size_bytes": 0},
        {"size_bytes": CONTENT_BYTES + 1},
        {"size_bytes": 3 * CHUNK_BYTES + 1},
        {"digest": b"short"},
        {"chunk_digests": [bytes(32)] * 2},
        {"chunk_digests": [bytes(31)] * 3},
    ],
    ids=str,
)
def test_a_malformed_description_is_refused(change: dict[str, object]) -> None:
    content = describe_content(DATA)
    for name in change:
        content.ClearField(name)  # type: ignore[arg-type]  # a name of the message
    content.MergeFrom(Content(**change))  # type: ignore[arg-type]  # fields by name
    with pytest.raises(ContentError):
        ContentVerifier(content)
    with pytest.raises(ContentError):
        verify_content(content, DATA)


def test_there_is_no_empty_content() -> None:
    with pytest.raises(ContentError):
        describe_content(b"")
