"""What this daemon is and how it is doing: capabilities, health, and why it is not at its best."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import time
from collections.abc import Collection

from fuse_cache.proto.compile_pb2 import CapabilitiesResponse, Limits, ToolchainOffer
from fuse_cache.proto.graph_format import SCHEMA as GRAPH_SCHEMA
from fuse_cache.proto.limits import CHUNK_BYTES, CONTENT_BYTES, GRAPH_LIMITS, INLINE_BYTES
from fuse_cache.proto.signing import MANIFEST_SCHEMA, TrustSet
from fuse_cache.server.freshness import Freshness
from fuse_cache.server.lookup import MAX_ITEMS
from fuse_cache.server.worker.link import Loading, SupervisorLink


class Status:
    """One place that knows whether we are SERVING, DEGRADED or DRAINING."""

    def __init__(
        self, *, targets: tuple[str, ...], freshness: Freshness, link: SupervisorLink, trusted: TrustSet
    ) -> None:
        """Take what is trusted, with the builders that are recalled already."""
        self.targets = targets
        self.freshness = freshness
        self.trusted = trusted
        self.draining = False
        self.store_reason = ""  # What does not work in the store, as it said last.
        self._link = link
        self._started_s = time.monotonic()

    @property
    def revocations_version(self) -> int:
        """How long the list of recalled builders is: it only grows, and survives with the store."""
        return len(self.trusted.revoked)

    @property
    def uptime_s(self) -> float:
        """Seconds since start."""
        return time.monotonic() - self._started_s

    @property
    def can_compile(self) -> bool:
        """Whether a fork server is loaded."""
        return self._link.loading is Loading.READY and not self.draining

    def problems(self) -> list[str]:
        """Return what does not work; empty while all does."""
        found = [self.store_reason, self.freshness.problem]
        if self._link.loading is Loading.FAILED:
            found.append(f"no compilation worker: {self._link.message}")
        return [reason for reason in found if reason]

    def name(self) -> str:
        """Return SERVING, DEGRADED or DRAINING."""
        if self.draining:
            return "DRAINING"
        return "DEGRADED" if self.problems() else "SERVING"

    def revoke(self, builders: Collection[str]) -> frozenset[str]:
        """Recall these builders, which hosts learn of through Capabilities; return those that are new."""
        new = frozenset(builders) - self.trusted.revoked
        if new:
            self.trusted = dataclasses.replace(self.trusted, revoked=self.trusted.revoked | new)
        return new

    def capabilities(self) -> CapabilitiesResponse:
        """Return the answer of `Capabilities`."""
        epoch = self.freshness.epoch
        offer = ToolchainOffer(
            name=str(epoch.toolchain),
            toolchain=epoch.toolchain.to_message(),
            epoch=epoch.name,
            ready=self.can_compile,
        )
        return CapabilitiesResponse(
            graph_schemas=(GRAPH_SCHEMA,),
            manifest_schemas=(MANIFEST_SCHEMA,),
            targets=self.targets,
            toolchains=(offer,),
            limits=Limits(
                graph_bytes=GRAPH_LIMITS.size_bytes,
                graph_nodes=GRAPH_LIMITS.nodes,
                artifact_bytes=CONTENT_BYTES,
                lookup_items=MAX_ITEMS,
                chunk_bytes=CHUNK_BYTES,
                inline_bytes=INLINE_BYTES,
            ),
            builder_keys=sorted(self.trusted.keys),
            revoked_builders=sorted(self.trusted.revoked),
            revocations_version=self.revocations_version,
            version=importlib.metadata.version("fuse-cache"),
            status=self.name(),
        )
