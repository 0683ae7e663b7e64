"""What a listing, a `prune` and a covering lookup must know of an artifact, without reading its manifest.

Tiers keep these bytes beside the entry and never look inside (`Meta.facts`). They are a copy for speed: the
manifest is the truth.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from fuse_cache.proto.artifact_pb2 import Manifest
from fuse_cache.server.cache.tier import NAME_BYTES, Meta

_VERSION = 1
_NUMBERS = struct.Struct(
    "<BQQIIQQId"
)  # version, lower, upper, symbol + 1, revision, created, content bytes, nodes, seconds
_LENGTH = struct.Struct("<H")  # Names are limited to 65,535 bytes; the daemon's own limits are far below.


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One artifact in a line."""

    namespace: str = ""
    family: bytes = b""  # the request without its range; empty: never answers a covering lookup
    lower: int = 0
    upper: int = 0
    symbol_plus_one: int = 0
    revision: int = 0
    created_unix_s: int = 0
    content_bytes: int = 0
    nodes: int = 0
    compile_seconds: float = 0.0
    target: str = ""
    epoch: str = ""
    builder: str = ""
    model: str = ""
    toolchain: bytes = b""  # torch fingerprint, then triton fingerprint

    def encode(self) -> bytes:
        numbers = _NUMBERS.pack(
            _VERSION,
            self.lower,
            self.upper,
            self.symbol_plus_one,
            self.revision,
            self.created_unix_s,
            self.content_bytes,
            self.nodes,
            self.compile_seconds,
        )
        texts = (self.namespace, self.target, self.epoch, self.builder, self.model)
        parts = [*(text.encode() for text in texts), self.family, self.toolchain]
        return numbers + b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def decode_facts(data: bytes) -> Facts | None:
    """Return the facts, or None when they are damaged or of another version: the manifest still says all."""
    try:
        version, lower, upper, symbol, revision, created, size, nodes, seconds = _NUMBERS.unpack_from(data)
        if version != _VERSION:
            return None
        parts: list[bytes] = []
        at = _NUMBERS.size
        for _ in range(7):
            (length,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size
            parts.append(data[at : at + length])
            at += length
        if at != len(data):
            return None
        namespace, target, epoch, builder, model = (part.decode() for part in parts[:5])
    except (struct.error, UnicodeDecodeError):
        return None
    return Facts(
        namespace=namespace,
        family=parts[5],
        lower=lower,
        upper=upper,
        symbol_plus_one=symbol,
        revision=revision,
        created_unix_s=created,
        content_bytes=size,
        nodes=nodes,
        compile_seconds=seconds,
        target=target,
        epoch=epoch,
        builder=builder,
        model=model,
        toolchain=parts[6],
    )


def describe(manifest: Manifest) -> Meta:
    """Return what the store keeps beside this manifest and its content.

    Raises: ValueError (content digest missing).
    """
    if len(manifest.content.digest) != NAME_BYTES:
        raise ValueError(f"the manifest names no content: digest of {len(manifest.content.digest)} bytes")
    facts = Facts(
        namespace=manifest.namespace,
        family=manifest.family_digest,
        lower=manifest.range.lower,
        upper=manifest.range.upper,
        symbol_plus_one=manifest.range.symbol_plus_one,
        revision=manifest.revision,
        created_unix_s=manifest.created_unix_s,
        content_bytes=manifest.content.size_bytes,
        nodes=manifest.nodes,
        compile_seconds=manifest.compile_seconds,
        target=manifest.target,
        epoch=manifest.epoch,
        builder=manifest.builder,
        model=manifest.model,
        toolchain=manifest.toolchain.torch_fingerprint + manifest.toolchain.triton_fingerprint,
    )
    return Meta(cost_s=manifest.compile_seconds, content=manifest.content.digest, facts=facts.encode())
