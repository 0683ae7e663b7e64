"""Why a graph has no key. It is compiled locally, and never given a made-up key."""

from __future__ import annotations

from fuse_cache.client.errors import FuseCacheError


class UnkeyableGraph(FuseCacheError, ValueError):
    """The graph holds what cannot be sent as plain data. Compile it locally, and report `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
