"""Nothing leaves an untrusted tier unchecked: bytes against their digest, manifests against their key and
signer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from blake3 import blake3
from google.protobuf.message import DecodeError

from fuse_cache.proto.artifact_pb2 import Manifest, SignedManifest
from fuse_cache.server.cache.tier import CorruptEntryError, Entry, Space, Tier, TierError, TierWrapper

# (name, entry) -> why it must not be served, or None.
Check: TypeAlias = Callable[[bytes, Entry], str | None]


class VerifiedTier(TierWrapper):
    """Checks every `get`. A bad entry is set aside in the tier below and raised as `CorruptEntryError`: once,
    then it is a miss.

    One that cannot be set aside (a read-only tier) is raised by each `get`, and `contains` no longer counts
    it: who asks only whether it is there must not be told yes for ever.

    It stands around each tier that somebody else can write: disk and Redis. The memory tier is filled through
    it.
    """

    def __init__(self, base: Tier, checks: Mapping[Space, Check]) -> None:
        super().__init__(base)
        self._checks = dict(checks)
        # Found bad and still there. Each change is one operation of a set, which threads may share.
        self._stuck: set[tuple[Space, bytes]] = set()

    def get(self, space: Space, name: bytes) -> Entry | None:
        try:
            entry = self.base.get(space, name)
            reason = None if entry is None else self._checks[space](name, entry)
            if reason is not None:
                raise CorruptEntryError(self.name, reason)
        except CorruptEntryError:
            self._set_aside(space, name)
            raise
        self._stuck.discard((space, name))
        return entry

    def put(self, space: Space, name: bytes, entry: Entry) -> None:
        if (space, name) in self._stuck:
            # A tier may keep a content that it has by name and size: not this one.
            self.base.delete(space, name)
            self._stuck.discard((space, name))
        self.base.put(space, name, entry)

    def contains(self, space: Space, name: bytes) -> bool:
        return (space, name) not in self._stuck and self.base.contains(space, name)

    def _set_aside(self, space: Space, name: bytes) -> None:
        try:
            self.base.quarantine(space, name)
        except TierError:
            self._stuck.add((space, name))
        else:
            self._stuck.discard((space, name))


def check_content(name: bytes, entry: Entry) -> str | None:
    """Compare a content with the digest that is its name."""
    return None if blake3(entry.data).digest() == name else "content digest differs"


def check_manifest(key: bytes, entry: Entry) -> str | None:
    """Check that this is the manifest of this key and names the content kept beside it.

    Who signed it is not looked at.
    """
    try:
        manifest = Manifest.FromString(SignedManifest.FromString(entry.data).manifest)
    except DecodeError:
        return "not a manifest"
    if manifest.key != key:
        return "the manifest is another key's"
    if manifest.content.digest != entry.meta.content:
        return "the manifest names another content than its entry"
    return None
