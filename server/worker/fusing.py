"""The passes of one build: from the request's PassConfig to what Inductor runs, and to what is told of it."""

from __future__ import annotations

from typing import Any

from fuse_cache.proto.request import RequestFields
from fuse_cache.server.worker.protocol import NearMiss, PassRecord


class Fusing:
    """Runs the passes that a request asks for."""

    def __init__(self, request: RequestFields) -> None:
        self._request = request

    def inductor_patches(self) -> dict[str, Any]:
        """Return the patches of Inductor's configuration that make it run the passes."""
        return {}

    def passes(self) -> tuple[PassRecord, ...]:
        """Return what each pass did. After the compilation."""
        return ()

    def near_misses(self) -> tuple[NearMiss, ...]:
        """Return the candidates that no pattern took, with reasons. After the compilation."""
        return ()
