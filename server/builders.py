"""The toolchains that this daemon compiles with, and which of them serves a host.

A host's own toolchain only chooses a builder; the key names the builder's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fuse_cache.proto import artifact_pb2
from fuse_cache.proto.toolchain import Toolchain
from fuse_cache.server.epoch import Epoch
from fuse_cache.server.errors import InvalidRequestError
from fuse_cache.server.freshness import Freshness
from fuse_cache.server.seeds import Seeds
from fuse_cache.server.worker.link import SupervisorLink
from fuse_cache.server.worker.pool import WorkerPool

TOOLCHAIN_BYTES = 512  # Four versions and three fingerprints: 150.
_MOST_HOSTS = 1024  # Kinds of hosts, not hosts: a few in practice.


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """One toolchain: what it is, and the processes that build with it."""

    name: str
    freshness: Freshness
    link: SupervisorLink
    pool: WorkerPool
    seeds: Seeds

    @property
    def epoch(self) -> Epoch:
        """What it builds under now."""
        return self.freshness.epoch

    @property
    def toolchain(self) -> Toolchain:
        """What it builds with now."""
        return self.freshness.epoch.toolchain


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What a host says of itself. Empty bytes: nothing, and it is taken at its request."""

    toolchain: bytes
    any_wheel: bool = False


def host_of(message: artifact_pb2.Toolchain, *, any_wheel: bool) -> Host:
    """Return the host that sent this.

    Raises:
        InvalidRequestError: longer than a toolchain can be.
    """
    if not message.torch:
        return Host(toolchain=b"", any_wheel=any_wheel)
    data = message.SerializeToString(deterministic=True)
    if len(data) > TOOLCHAIN_BYTES:
        raise InvalidRequestError(
            "REQUEST_MALFORMED", f"toolchain: {len(data)} bytes, the limit is {TOOLCHAIN_BYTES}"
        )
    return Host(toolchain=data, any_wheel=any_wheel)


class Builders:
    """All of them. The first is the daemon's own choice: for hosts that do not say what they have, and for
    what needs any worker."""

    def __init__(self, builders: Iterable[Builder]) -> None:
        self._all = tuple(builders)
        self._epochs: tuple[str, ...] = ()
        self._chosen: dict[tuple[Host, str], Builder | None] = {}

    def __iter__(self) -> Iterator[Builder]:
        return iter(self._all)

    @property
    def first(self) -> Builder:
        """The first."""
        return self._all[0]

    async def look(self) -> None:
        """Have every one look at its files. See `Freshness.look`."""
        await asyncio.gather(*(builder.freshness.look() for builder in self._all))

    def choose(self, host: Host, target: str) -> Builder | None:
        """Return the builder whose artifacts for `target` this host can use, or None."""
        epochs = tuple(builder.epoch.name for builder in self._all)
        if epochs != self._epochs or len(self._chosen) >= _MOST_HOSTS:
            self._chosen.clear()
            self._epochs = epochs
        question = host, target
        if question not in self._chosen:
            place = choose(host, target, [builder.toolchain for builder in self._all])
            self._chosen[question] = None if place is None else self._all[place]
        return self._chosen[question]

    def refusal(self, host: Host, target: str) -> str:
        """Say why none serves this host, and what is on offer."""
        toolchain = _read(host)
        reasons = [
            toolchain.compatible_with(builder.toolchain, target=target, any_wheel=host.any_wheel)
            for builder in self._all
        ]
        if len(self._all) == 1:
            return f"{reasons[0]}; on offer: {self.offer()}"
        pairs = zip(self._all, reasons, strict=True)
        why = ", ".join(f"{builder.name}: {reason}" for builder, reason in pairs)
        return f"no toolchain serves this host ({why}); on offer: {self.offer()}"

    def offer(self) -> str:
        """Return the toolchains as people read them."""
        if len(self._all) == 1:
            return str(self.first.toolchain)
        return "; ".join(f"{builder.name}: {builder.toolchain}" for builder in self._all)


def choose(host: Host, target: str, toolchains: Sequence[Toolchain]) -> int | None:
    """Return the place of the toolchain that serves `host` best: its own, else the first that is compatible.

    The compatibility table itself is `Toolchain.compatible_with`.
    """
    if not host.toolchain:
        return 0
    own = _read(host)
    fitting = [
        (own != toolchain, own.python != toolchain.python, own.torch != toolchain.torch, place)
        for place, toolchain in enumerate(toolchains)
        if own.compatible_with(toolchain, target=target, any_wheel=host.any_wheel) is None
    ]
    return min(fitting)[-1] if fitting else None


def _read(host: Host) -> Toolchain:
    return Toolchain.from_message(artifact_pb2.Toolchain.FromString(host.toolchain))
