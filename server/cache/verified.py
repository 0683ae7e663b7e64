"""Nothing leaves an untrusted tier unchecked: bytes against their digest, manifests against their key and
signer.
"""

from __future__ import annotations

import contextlib
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

    It stands around each tier that somebody else can write: disk and Redis. The memory tier is filled through
    it.
    """

    def __init__(self, base: Tier, checks: Mapping[Space, Check]) -> None:
        super().__init__(base)
        self._checks = dict(checks)

    def get(self, space: Space, name: bytes) -> Entry | None:
        try:
            entry = self.base.get(space, name)
            if entry is None:
                return None
            reason = self._checks[space](name, entry)
            if reason is None:
                return entry
            raise CorruptEntryError(self.name, reason)
        except CorruptEntryError:
            # A read-only tier keeps it, and each get finds it bad again: still never served.
            with contextlib.suppress(TierError):
                self.base.quarantine(space, name)
            raise


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
