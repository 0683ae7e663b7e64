"""What this daemon is and how it is doing: capabilities, health, and why it is not at its best."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import time
from collections.abc import Collection

from fuse_cache.proto.compile_pb2 import CapabilitiesResponse, Limits, TargetOffer, ToolchainOffer, Way
from fuse_cache.proto.cpu_target import is_cpu_target
from fuse_cache.proto.graph_format import SCHEMA as GRAPH_SCHEMA
from fuse_cache.proto.limits import CHUNK_BYTES, CONTENT_BYTES, GRAPH_LIMITS, INLINE_BYTES
from fuse_cache.proto.signing import MANIFEST_SCHEMA, TrustSet
from fuse_cache.proto.toolchain import Toolchain
from fuse_cache.server.builders import Builders
from fuse_cache.server.gpus_here import architectures_here
from fuse_cache.server.lookup import MAX_ITEMS
from fuse_cache.server.worker.link import Loading


def way_of(target: str, toolchain: Toolchain, here: Collection[str]) -> Way.ValueType:
    """Say how a toolchain's workers build for `target` on a machine that has GPUs of architectures `here`.

    As they do it themselves (target_build.py): natively where torch can use such a GPU and the request's has
    what this one has, otherwise without any.
    """
    if is_cpu_target(target):
        return Way.WAY_PROCESSOR
    return Way.WAY_ON_DEVICE if toolchain.cuda and target in here else Way.WAY_WITHOUT_DEVICE


class Status:
    """One place that knows whether we are SERVING, DEGRADED or DRAINING."""

    def __init__(self, *, targets: tuple[str, ...], builders: Builders, trusted: TrustSet) -> None:
        """Take what is trusted, with the builders that are recalled already."""
        self.targets = targets
        self.builders = builders
        self.trusted = trusted
        self.draining = False
        self.store_reason = ""  # What does not work in the store, as it said last.
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
        """Whether the first toolchain's fork server is loaded."""
        return self.builders.first.link.loading is Loading.READY and not self.draining

    def problems(self) -> list[str]:
        """Return what does not work; empty while all does."""
        found = [self.store_reason]
        for builder in self.builders:
            found.append(builder.freshness.problem)
            if builder.link.loading is Loading.FAILED:
                found.append(f"no compilation worker ({builder.name}): {builder.link.message}")
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

    def _target_offers(self, toolchain: Toolchain) -> list[TargetOffer]:
        here = architectures_here()
        return [TargetOffer(name=name, way=way_of(name, toolchain, here)) for name in self.targets]

    def capabilities(self) -> CapabilitiesResponse:
        """Return the answer of `Capabilities`."""
        offers = [
            ToolchainOffer(
                name=builder.name,
                toolchain=builder.toolchain.to_message(),
                epoch=builder.epoch.name,
                ready=builder.link.loading is Loading.READY and not self.draining,
                targets=self._target_offers(builder.toolchain),
            )
            for builder in self.builders
        ]
        return CapabilitiesResponse(
            graph_schemas=(GRAPH_SCHEMA,),
            manifest_schemas=(MANIFEST_SCHEMA,),
            targets=self.targets,
            toolchains=offers,
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
