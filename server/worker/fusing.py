"""The passes of one build: from the request's PassConfig to what Inductor runs, and to what is told of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import GraphModule

from fuse_cache.passes.dump import Observer
from fuse_cache.passes.manager import PassManager
from fuse_cache.proto.pass_config import PassConfigError, ResolvedPassConfig
from fuse_cache.proto.request import RequestFields
from fuse_cache.server.worker.protocol import BuildFailed, NearMiss, PassRecord


class Fusing:
    """Runs the passes that a request asks for."""

    def __init__(self, request: RequestFields, observers: tuple[Observer, ...] = ()) -> None:
        """Prepare the passes. `observers` are told the graph before and after each.

        Raises:
            BuildFailed: the request's PassConfig is not one of this version.
        """
        try:
            resolved = ResolvedPassConfig.decode(request.pass_config)
        except (PassConfigError, ValueError) as error:
            raise BuildFailed("REQUEST_MALFORMED", f"pass_config: {error}", stage="passes") from error
        self._manager = PassManager(resolved, request.range, request.target, observers=observers)

    def inductor_patches(self, gm: GraphModule, options: Mapping[str, object]) -> dict[str, Any]:
        """Return the patches of Inductor's configuration that make it run the passes, over the user's
        options."""
        return dict(self._manager.inductor_patches(gm, options))

    def passes(self) -> tuple[PassRecord, ...]:
        """Return what each pass did. After the compilation."""
        return tuple(
            PassRecord(
                name=record.name,
                on=record.on,
                reason=record.reason,
                candidates=record.candidates,
                matches=record.matches,
                milliseconds=record.milliseconds,
                bytes_saved=record.bytes_saved,
                is_fusion=record.is_fusion,
            )
            for record in self._manager.report()
        )

    def near_misses(self) -> tuple[NearMiss, ...]:
        """Return the candidates that no pattern took, with reasons. After the compilation."""
        return tuple(
            NearMiss(pass_name=miss.pass_name, reason=miss.reason.value, node=miss.node, detail=miss.detail)
            for miss in self._manager.near_misses()
        )
