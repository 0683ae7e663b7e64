"""Artifacts as the daemon publishes them, small and all different."""

from __future__ import annotations

from dataclasses import dataclass

from blake3 import blake3

from fuse_cache.proto.artifact_pb2 import Manifest, SignedManifest
from fuse_cache.server.cache.facts import describe
from fuse_cache.server.cache.tier import Entry, Meta, Space, Tier


@dataclass(frozen=True)
class Artifact:
    key: bytes
    signed_manifest: bytes
    content: bytes
    meta: Meta

    @property
    def digest(self) -> bytes:
        return self.meta.content

    @property
    def manifest_entry(self) -> Entry:
        return Entry(self.signed_manifest, self.meta)

    @property
    def content_entry(self) -> Entry:
        return Entry(self.content, Meta(cost_s=self.meta.cost_s))

    def put_into(self, tier: Tier) -> None:
        tier.put(Space.CONTENT, self.digest, self.content_entry)
        tier.put(Space.MANIFEST, self.key, self.manifest_entry)


def artifact(
    number: int,
    *,
    size_bytes: int = 1_000,
    content: bytes | None = None,
    cost_s: float = 1.0,
    namespace: str = "team",
    family: bytes = b"",
    lower: int = 0,
    upper: int = 0,
    symbol_plus_one: int = 0,
) -> Artifact:
    """Make the artifact of this number: the same one each time."""
    data = _bytes_of(number, size_bytes) if content is None else content
    manifest = Manifest(
        schema=1,
        key=blake3(b"key %d" % number).digest(),
        namespace=namespace,
        target="cpu-avx2",
        epoch="e1",
        builder="b" * 32,
        created_unix_s=1_700_000_000 + number,
        compile_seconds=cost_s,
        family_digest=family,
        nodes=number,
        model=f"model-{number}",
    )
    manifest.range.lower, manifest.range.upper = lower, upper
    manifest.range.symbol_plus_one = symbol_plus_one
    manifest.content.digest = blake3(data).digest()
    manifest.content.size_bytes = len(data)
    signed = SignedManifest(manifest=manifest.SerializeToString())
    return Artifact(manifest.key, signed.SerializeToString(), data, describe(manifest))


def _bytes_of(number: int, size_bytes: int) -> bytes:
    return blake3(b"content %d" % number).digest(length=size_bytes) if size_bytes else b""
