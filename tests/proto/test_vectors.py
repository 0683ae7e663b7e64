"""What schema 1 wrote is read for ever: these tests and the files in proto/vectors/v1 never change."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fuse_cache.proto.artifact_pb2 import SignedManifest
from fuse_cache.proto.container import pack, unpack
from fuse_cache.proto.content import describe_content, verify_content
from fuse_cache.proto.digest import FieldDigest
from fuse_cache.proto.graph_codec import decode, encode, graph_digest
from fuse_cache.proto.request import decode_request
from fuse_cache.proto.signing import SigningKey, TrustSet, builder_id, verify
from tests.proto.graphs import every_part, large
from tests.proto.write_vectors import REQUESTS, VECTORS, graph_vector


def vector(name: str) -> Any:
    return json.loads((VECTORS / name).read_text(encoding="utf-8"))


GRAPHS = vector("graph.json")
STORED_REQUESTS = vector("request.json")


@pytest.mark.parametrize("stored", GRAPHS, ids=lambda stored: str(stored["name"]))
def test_stored_graphs_are_read_and_mean_what_they_meant(stored: dict[str, Any]) -> None:
    data = bytes.fromhex(stored["bytes"])
    graph = decode(data)
    assert encode(graph) == data
    assert graph_digest(data).hex() == stored["digest"]
    assert graph_vector(stored["name"], graph) == stored


def test_the_same_graphs_are_still_written_so() -> None:
    written = {"every part": encode(every_part()), "large": encode(large(40))}
    for stored in GRAPHS:
        if stored["name"] in written:
            assert written[stored["name"]].hex() == stored["bytes"]


@pytest.mark.parametrize("stored", STORED_REQUESTS, ids=lambda stored: str(stored["name"]))
def test_stored_requests_are_read_and_keep_their_digests(stored: dict[str, Any]) -> None:
    data = bytes.fromhex(stored["bytes"])
    request = decode_request(data)
    assert request == REQUESTS[stored["name"]]
    assert request.encode() == data
    assert request.request_digest().hex() == stored["request_digest"]
    assert request.family_digest().hex() == stored["family_digest"]


def test_a_stored_container_is_read() -> None:
    stored = vector("container.json")
    sections = {name: bytes.fromhex(section) for name, section in stored["sections"].items()}
    assert unpack(bytes.fromhex(stored["bytes"])) == sections
    # Other versions of zstandard may compress otherwise; all that is ours is the same.
    assert unpack(pack(sections)) == sections


def test_content_keeps_its_digests() -> None:
    stored = vector("content.json")
    content = describe_content(bytes(stored["zeros"]))
    assert content.digest.hex() == stored["digest"]
    assert [digest.hex() for digest in content.chunk_digests] == stored["chunk_digests"]


def test_a_stored_manifest_is_verified_and_signed_the_same_again() -> None:
    stored = vector("manifest.json")
    public_key = bytes.fromhex(stored["public_key"])
    assert builder_id(public_key) == stored["builder"]
    signed = SignedManifest()
    signed.ParseFromString(bytes.fromhex(stored["signed_manifest"]))
    manifest = verify(signed, TrustSet(keys=frozenset({public_key})))
    assert manifest.builder == stored["builder"]
    assert manifest.target == "sm_90"
    assert manifest.compile_seconds == 12.5
    verify_content(manifest.content, bytes.fromhex(vector("container.json")["bytes"]))
    key = SigningKey.from_text(f"fuse-cache-ed25519-private {stored['private_key']}")
    assert key.sign(signed.manifest).signature.hex() == stored["signature"]


def test_field_digests_keep_their_form() -> None:
    stored = vector("digest.json")
    fields: list[tuple[str, Any]] = [
        ("none", None),
        ("flag", True),
        ("n", -1),
        ("x", 0.5),
        ("s", "é"),
        ("b", b"\x00"),
        ("t", (1, ())),
    ]
    assert FieldDigest(stored["context"]).add_all(fields).digest().hex() == stored["digest"]
