"""A fast tier over a slow one: asked in that order, and the fast one is filled on the way back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TypeAlias

from fuse_cache.server.cache.tier import (
    CorruptEntryError,
    Entry,
    Space,
    Stored,
    Tier,
    TierError,
    TierUnavailableError,
    Usage,
)

Action: TypeAlias = Callable[[Space, bytes], bool]


class LayeredTier(Tier):
    """Two tiers as one. Three levels are two of these: Layered(memory, Layered(disk, redis)).

    Neither tier down nor damage in one keeps the other from answering. Only when nobody had the entry does
    the first outage or damage surface, so that "not there" stays apart from "could not look".
    """

    def __init__(self, fast: Tier, slow: Tier) -> None:
        self.fast = fast
        self.slow = slow
        self.name = f"{fast.name}+{slow.name}"

    def get(self, space: Space, name: bytes) -> Entry | None:
        trouble: TierError | None = None
        try:
            entry = self.fast.get(space, name)
            if entry is not None:
                return entry
        except (TierUnavailableError, CorruptEntryError) as error:
            trouble = error
        return self.get_slow(space, name, trouble)

    def get_slow(self, space: Space, name: bytes, trouble: TierError | None = None) -> Entry | None:
        """Ask the slow tier only and fill the fast one; for a caller who asked the fast one itself."""
        entry = self.slow.get(space, name)
        if entry is not None:
            # The entry is in hand: a fast tier that cannot keep it costs the next reader time and this one
            # nothing.
            _attempt(self.fast, space, name, entry)
            return entry
        if trouble is not None:
            raise trouble
        return None

    def put(self, space: Space, name: bytes, entry: Entry) -> None:
        """Put into both.

        The slow tier's failure is raised after the fast one has the entry: the caller can still serve it.
        """
        failure: TierError | None = None
        try:
            self.slow.put(space, name, entry)
        except TierError as error:
            failure = error
        _attempt(self.fast, space, name, entry)
        if failure is not None:
            raise failure

    def contains(self, space: Space, name: bytes) -> bool:
        try:
            if self.fast.contains(space, name):
                return True
        except TierUnavailableError:
            pass
        return self.slow.contains(space, name)

    def delete(self, space: Space, name: bytes) -> bool:
        # Slow first: else a reader could fill the fast one again in between.
        return _both(self.slow.delete, self.fast.delete, space, name)

    def quarantine(self, space: Space, name: bytes) -> bool:
        return _both(self.slow.quarantine, self.fast.quarantine, space, name)

    def iterate(self, space: Space) -> Iterator[Stored]:
        """Yield every entry once: those of the fast tier (it may hold some whose write was lost below), then
        the rest.
        """
        seen: set[bytes] = set()
        for stored in self.fast.iterate(space):
            seen.add(stored.name)
            yield stored
        try:
            for stored in self.slow.iterate(space):
                if stored.name not in seen:
                    yield stored
        except TierUnavailableError:
            if not seen:
                raise

    def naming(self, content: bytes) -> list[bytes]:
        """Return those of both tiers: each part of an artifact may be in another one."""
        named = {*self.fast.naming(content)}
        try:
            named.update(self.slow.naming(content))
        except TierUnavailableError:
            if not named:
                raise
        return list(named)

    def touch(self, space: Space, names: Collection[bytes]) -> None:
        self.fast.touch(space, names)
        self.slow.touch(space, names)

    def health(self) -> str:
        return "; ".join(text for text in (self.fast.health(), self.slow.health()) if text)

    def usage(self) -> Usage:
        """Return the slow tier's sizes while it works: it holds everything. Counters are those of both."""
        fast, slow = self.fast.usage(), self.slow.usage()
        holder = slow if slow.entries >= fast.entries else fast
        return Usage(
            entries=holder.entries,
            size_bytes=holder.size_bytes,
            limit_bytes=holder.limit_bytes,
            evictions=slow.evictions,
            quarantined=slow.quarantined,
            lost_writes=slow.lost_writes,
            index_rebuilds=slow.index_rebuilds,
        )

    def maintain(self) -> None:
        self.fast.maintain()
        self.slow.maintain()

    def close(self) -> None:
        self.fast.close()
        self.slow.close()


def _both(first: Action, second: Action, space: Space, name: bytes) -> bool:
    """Do both, whatever one of them raises; raise only when neither did anything."""
    done = False
    failure: TierError | None = None
    for action in (first, second):
        try:
            done = action(space, name) or done
        except TierError as error:
            failure = failure or error
    if failure is not None and not done:
        raise failure
    return done


def _attempt(tier: Tier, space: Space, name: bytes, entry: Entry) -> None:
    try:
        tier.put(space, name, entry)
    except TierError:
        return  # Counted by the tier itself (lost_writes); the caller has the entry.
