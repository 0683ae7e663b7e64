"""Counts what a tier answers: hit, miss, unavailable and corrupt are four different things."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fuse_cache.server.cache.tier import (
    CorruptEntryError,
    Entry,
    Space,
    Tier,
    TierUnavailableError,
    TierWrapper,
)


@dataclass(slots=True)
class Counters:
    """Answers of one tier since daemon start."""

    hit: int = 0
    miss: int = 0
    unavailable: int = 0
    corrupt: int = 0

    def as_dict(self) -> dict[str, int]:
        return {"hit": self.hit, "miss": self.miss, "unavailable": self.unavailable, "corrupt": self.corrupt}


@dataclass(slots=True)
class Measurements:
    """What `MeasuredTier` saw, per space, with the seconds spent in `get`."""

    manifest: Counters = field(default_factory=Counters)
    content: Counters = field(default_factory=Counters)
    get_seconds: float = 0.0

    def of(self, space: Space) -> Counters:
        return self.manifest if space is Space.MANIFEST else self.content


class MeasuredTier(TierWrapper):
    """Counts the answers of `get`.

    It stands outside `VerifiedTier` and `BoundedTier`, whose errors it counts.
    """

    def __init__(self, base: Tier, *, now_s: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(base)
        self._now_s = now_s
        self._lock = threading.Lock()  # Guards _seen. Nothing else happens under it.
        self._seen = Measurements()

    def get(self, space: Space, name: bytes) -> Entry | None:
        started_s = self._now_s()
        outcome = "hit"
        try:
            entry = self.base.get(space, name)
            if entry is None:
                outcome = "miss"
            return entry
        except TierUnavailableError:
            outcome = "unavailable"
            raise
        except CorruptEntryError:
            outcome = "corrupt"
            raise
        finally:
            self._count(space, outcome, self._now_s() - started_s)

    def recount_as_miss(self, space: Space) -> None:
        """Turn the last hit into a miss: the entry was there but what it names was not."""
        with self._lock:
            counters = self._seen.of(space)
            counters.hit -= 1
            counters.miss += 1

    def lookups(self) -> dict[str, int]:
        """Return what lookups met: hits and misses of manifests; outages and damage of both spaces."""
        with self._lock:
            counts = self._seen.manifest.as_dict()
            counts["unavailable"] += self._seen.content.unavailable
            counts["corrupt"] += self._seen.content.corrupt
            return counts

    def get_seconds(self) -> float:
        with self._lock:
            return self._seen.get_seconds

    def _count(self, space: Space, outcome: str, seconds: float) -> None:
        with self._lock:
            counters = self._seen.of(space)
            setattr(counters, outcome, getattr(counters, outcome) + 1)
            self._seen.get_seconds += seconds
