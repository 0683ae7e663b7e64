"""What the catalogue answers: a hit, a line of a listing, what became of a publish."""

from __future__ import annotations

from dataclasses import dataclass

from fuse_cache.server.cache.facts import Facts
from fuse_cache.server.cache.tier import Meta


@dataclass(frozen=True, slots=True)
class Found:
    """A hit. For a manifest, its content was there a moment ago."""

    data: bytes
    meta: Meta
    tier: str


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """One artifact of a listing. `hits` is counted since daemon start."""

    key: bytes
    facts: Facts
    content_digest: bytes
    size_bytes: int  # manifest and content
    hits: int


@dataclass(frozen=True, slots=True)
class Published:
    """What became of a publish: `lost` says why a slower tier did not keep it ("" when all did)."""

    lost: str = ""
