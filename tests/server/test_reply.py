"""The reply written by hand is what protobuf reads."""

from __future__ import annotations

import pytest

from fuse_cache.proto.artifact_pb2 import SignedManifest
from fuse_cache.proto.compile_pb2 import LookupResponse, LookupResult
from fuse_cache.server import reply


@pytest.mark.parametrize("content_bytes", [0, 1, 127, 128, 70_000])
@pytest.mark.parametrize("manifest_bytes", [0, 100, 20_000])
def test_hits_and_misses_read_back_as_written(content_bytes: int, manifest_bytes: int) -> None:
    signed = SignedManifest(manifest=bytes(manifest_bytes), signature=b"s" * 64, public_key=b"k" * 32)
    content = b"c" * content_bytes
    data = reply.response(
        [reply.MISS, reply.hit(signed.SerializeToString(), content, "memory"), reply.RUNNING], "epoch", 300
    )
    assert LookupResponse.FromString(data) == LookupResponse(
        results=[
            LookupResult(),
            LookupResult(found=True, manifest=signed, inline_content=content, tier="memory"),
            LookupResult(running=True),
        ],
        epoch="epoch",
        revocations_version=300,
    )


def test_nothing_asked_nothing_said() -> None:
    assert reply.response([], "", 0) == b""
