"""The facade that the daemon asks: everything of the catalogue, off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import ParamSpec, TypeVar

from fuse_cache.server.cache.answers import EntryInfo, Found, Published
from fuse_cache.server.cache.catalogue import Catalogue
from fuse_cache.server.cache.check import Problem
from fuse_cache.server.cache.layered import LayeredTier
from fuse_cache.server.cache.measured import MeasuredTier
from fuse_cache.server.cache.tier import Meta, Tier

P = ParamSpec("P")
T = TypeVar("T")

THREADS = 4  # Disk reads overlap; more only queue behind one disk and one index lock.
LISTING_BATCH = 512  # Entries per hop between thread and loop: about 1 ms of work.
MAINTENANCE_PERIOD_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Counters since daemon start, and sizes now."""

    lookups: dict[str, dict[str, int]]  # tier -> hit, miss, unavailable, corrupt
    entries: int
    size_bytes: int
    limit_bytes: int
    evictions: int
    quarantined: int
    lost_writes: int
    index_rebuilds: int
    status: str  # "SERVING" or "DEGRADED"
    reason: str  # what does not work, "" while SERVING
    get_seconds: dict[str, float]


class Store:
    """Manifests by key and contents by digest, for an asyncio server.

    A hit of the memory tier is answered without leaving the loop. All else runs in a few threads of the
    store's own, so that a slow disk never takes the threads that others need. `catalogue` is the same thing
    for synchronous callers.
    """

    def __init__(self, catalogue: Catalogue, checker: Callable[..., list[Problem]] | None = None) -> None:
        self.catalogue = catalogue
        self._checker = checker
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="store")
        self._reading: dict[bytes, asyncio.Future[Found | None]] = {}  # touched on the loop only
        self._stop = threading.Event()
        self._keeper: threading.Thread | None = None

    def start(self) -> None:
        """Begin the slow work behind a start (family index, lost files). Lookups are served meanwhile."""
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._keep, name="store-keeper", daemon=True)
            self._keeper.start()

    async def close(self) -> None:
        """Stop the background work and let go of all tiers. Calls that run now are waited for."""
        self._stop.set()
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    async def get_manifest(self, key: bytes) -> Found | None:
        """Return the serialised SignedManifest whose content is there too, or None: a miss."""
        entry, found = self.catalogue.peek(key)
        if found is not None:
            return found
        return await self._off_loop(self.catalogue.get_manifest, key, entry)

    async def get_content(self, digest: bytes) -> Found | None:
        """Return the content, verified, or None when it is gone: look up again.

        Simultaneous readers share one read.
        """
        found = self.catalogue.get_content_fast(digest)
        if found is not None:
            return found
        running = self._reading.get(digest)
        if running is None:
            running = asyncio.ensure_future(self._off_loop(self.catalogue.get_content, digest))
            self._reading[digest] = running
            running.add_done_callback(lambda _: self._reading.pop(digest, None))
        # A reader that is cancelled leaves the read to the others.
        return await asyncio.shield(running)

    def content_at_hand(self, digest: bytes) -> Found | None:
        """Return the content if it is in the memory tier. Never blocks."""
        return self.catalogue.get_content_fast(digest)

    async def publish(self, signed_manifest: bytes, key: bytes, content: bytes, meta: Meta) -> Published:
        """Store content first, manifest last (`Catalogue.publish`).

        Get `meta` from `facts.describe(manifest)`.
        """
        return await self._off_loop(self.catalogue.publish, signed_manifest, key, content, meta)

    async def namespaces_of(self, digest: bytes) -> frozenset[str]:
        """Return the namespaces whose manifests name this content. Raises: TierUnavailableError."""
        return await self._off_loop(self.catalogue.namespaces_of, digest)

    async def inspect(self, key: bytes) -> bytes | None:
        """Return the serialised SignedManifest for people to look at, without counting it as a lookup."""
        return await self._off_loop(self.catalogue.inspect, key)

    async def remove(self, key: bytes) -> bool:
        """Remove one artifact; its content goes with the last manifest that names it. Raises: TierError."""
        return await self._off_loop(self.catalogue.remove, key)

    async def quarantine(self, key: bytes, reason: str) -> bool:
        """Set one artifact and its content aside. Raises: TierError."""
        return await self._off_loop(self.catalogue.quarantine, key, reason)

    async def iterate(self) -> AsyncIterator[EntryInfo]:
        """Yield what is stored, in no order. Raises: TierUnavailableError (nothing could be listed)."""
        entries = self.catalogue.entries()
        while batch := await self._off_loop(lambda: list(islice(entries, LISTING_BATCH))):
            for info in batch:
                yield info

    async def check(self, *, fix: bool) -> list[Problem]:
        """Verify everything on disk; with `fix`, put it right.

        Takes minutes for a large store. Raises: TierError, OSError.
        """
        if self._checker is None:
            return []
        # A thread of its own: the store's few are for lookups.
        return await asyncio.to_thread(self._checker, fix=fix)

    def covering(
        self,
        namespace: str,
        family: bytes,
        *,
        symbol_plus_one: int,
        lower: int,
        upper: int,
        max_revision: int = 0,
    ) -> list[bytes]:
        """Return keys of artifacts of this family whose range holds [lower, upper], tightest first.

        Hints: look each up.
        """
        return self.catalogue.families.covering(
            namespace,
            family,
            symbol_plus_one=symbol_plus_one,
            lower=lower,
            upper=upper,
            max_revision=max_revision,
        )

    async def stats(self) -> StoreStats:
        return await self._off_loop(self.stats_now)

    def stats_now(self) -> StoreStats:
        """Return the counters; asks the disk index (milliseconds), so not on the loop."""
        usage, reason = self.catalogue.usage(), self.catalogue.health()
        return StoreStats(
            lookups=self.catalogue.lookups(),
            entries=usage.entries,
            size_bytes=usage.size_bytes,
            limit_bytes=usage.limit_bytes,
            evictions=usage.evictions,
            quarantined=usage.quarantined,
            lost_writes=usage.lost_writes,
            index_rebuilds=usage.index_rebuilds,
            status="DEGRADED" if reason else "SERVING",
            reason=reason,
            get_seconds=self.catalogue.get_seconds(),
        )

    async def _off_loop(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: call(*args, **kwargs))

    def _keep(self) -> None:
        def pause() -> bool:
            return not self._stop.wait(0.003)

        while not self._stop.is_set():
            # First what the index says, in a second; then what maintenance finds and other processes
            # published meanwhile.
            self.catalogue.fill_families(pause)
            self.catalogue.tiers.maintain()
            if self._stop.wait(MAINTENANCE_PERIOD_S):
                return

    def _close(self) -> None:
        self._threads.shutdown(wait=True)
        self.catalogue.tiers.close()  # Ends the maintenance that may run.
        if self._keeper is not None:
            self._keeper.join()


def compose(memory: Tier, *slower: Tier, checker: Callable[..., list[Problem]] | None = None) -> Store:
    """Lay the tiers over one another, the fastest first, each counted."""
    measured = [MeasuredTier(tier) for tier in (memory, *slower)]
    below: Tier = measured[-1]
    for tier in reversed(measured[1:-1]):
        below = LayeredTier(tier, below)
    return Store(Catalogue(LayeredTier(measured[0], below), {tier.name: tier for tier in measured}), checker)
