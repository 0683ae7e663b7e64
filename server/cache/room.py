"""Keeps the disk tier under its cap, and remembers what was used until the index can be told."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from functools import partial

from fuse_cache.server.cache.eviction import Candidate, choose_victims
from fuse_cache.server.cache.folder import Folder
from fuse_cache.server.cache.guarded_index import GuardedIndex
from fuse_cache.server.cache.index import Index, parse_row_key
from fuse_cache.server.cache.tier import Space, TierError

# A younger content without a manifest is taken for half of a publish, and not evicted.
HALF_PUBLISHED_S = 60.0
MAX_NOTED_USES = 8_192  # Uses kept until the next eviction or maintenance; more are dropped: they are a hint.
# An eviction ranks every entry (0.3 s for 100,000). Freeing a 20th of the cap at once spreads that over many
# writes.
SLACK_PART = 20


class Uses:
    """What was used since the index was last told. A get thus writes nothing to disk."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()  # Guards _noted. Nothing else happens under it.
        self._noted: dict[tuple[Space, bytes], tuple[float, int]] = {}

    def note(self, space: Space, names: Collection[bytes]) -> None:
        now_s = self._now_s()
        with self._lock:
            for name in names:
                _, count = self._noted.get((space, name), (0.0, 0))
                if count or len(self._noted) < MAX_NOTED_USES:
                    self._noted[space, name] = (now_s, count + 1)

    def take(self) -> dict[tuple[Space, bytes], tuple[float, int]]:
        with self._lock:
            noted, self._noted = self._noted, {}
        return noted


class Room:
    """The space that files may take.

    `limit_bytes` bounds the files of all processes together, plus one write of each.
    """

    def __init__(
        self, folder: Folder, guarded: GuardedIndex, *, limit_bytes: int, now_s: Callable[[], float]
    ) -> None:
        self.limit_bytes = limit_bytes
        self.evictions = 0
        self.uses = Uses(now_s)
        self._folder = folder
        self._guarded = guarded
        self._now_s = now_s
        self._making = threading.Lock()  # One thread makes room at a time. Held during I/O; guards the next.
        self._in_flight_bytes = 0

    @contextlib.contextmanager
    def taken(self, size_bytes: int) -> Iterator[None]:
        """Hold `size_bytes` for a write, after evicting what is in the way.

        Raises: TierError (the index is unusable).
        """
        with self._making:
            if self._excess(size_bytes) > 0:
                # Before anything is given up, the total is counted anew: one flipped bit in it must not empty
                # the store.
                self._guarded.run(lambda index: index.recount())
                self._evict(self._excess(size_bytes))
            self._in_flight_bytes += size_bytes
        try:
            yield
        finally:
            with self._making:
                self._in_flight_bytes -= size_bytes

    def _excess(self, size_bytes: int) -> int:
        total = self._guarded.run(lambda index: index.total_bytes())
        return total + self._in_flight_bytes + size_bytes - self.limit_bytes

    def make(self, size_bytes: int) -> None:
        """Evict at least `size_bytes` (for a disk that others filled), and what is above the cap.

        Raises: TierError.
        """
        with self._making:
            self._evict(max(size_bytes, self._excess(0)))

    def fold_uses(self) -> None:
        """Tell the index what was used. Raises: TierError."""
        noted = self.uses.take()
        if noted:
            self._guarded.run(lambda index: index.touch(noted))

    def _evict(self, needed_bytes: int) -> None:
        """Give up the least worthy contents, each with the manifests that name it.

        Called with _making held.
        """
        if needed_bytes <= 0:
            return
        self.fold_uses()
        for victim in self._victims(needed_bytes + self.limit_bytes // SLACK_PART):
            space, name = parse_row_key(victim.name)
            doomed = [(space, name)]
            if space is Space.CONTENT:
                # Manifests first: a reader then finds neither, or both.
                doomed = [*((Space.MANIFEST, key) for key in self._naming(name)), (space, name)]
            self.delete(doomed)
            self.evictions += 1

    def _victims(self, needed_bytes: int) -> list[Candidate]:
        """Choose, by sizes that are those of the files: a row with a damaged size is set right and the choice
        made anew.
        """
        now_s = self._now_s()
        unnamed_before_s = now_s - HALF_PUBLISHED_S
        victims: list[Candidate] = []
        for _ in range(3):
            candidates = self._guarded.run(lambda index: index.candidates(unnamed_before_s=unnamed_before_s))
            victims = choose_victims(candidates, needed_bytes=needed_bytes, now_s=now_s)
            real = {victim.name: self._folder.size(*parse_row_key(victim.name)) or 0 for victim in victims}
            wrong = {
                victim.name: real[victim.name] for victim in victims if real[victim.name] != victim.size_bytes
            }
            if not wrong:
                break
            self._guarded.run(partial(Index.resize, sizes=wrong))
        return victims

    def _naming(self, content: bytes) -> list[bytes]:
        return self._guarded.run(lambda index: index.naming(content))

    def delete(self, doomed: list[tuple[Space, bytes]]) -> bool:
        """Unlink the files, then delete their rows; tell whether a file was there. Raises: OSError.

        Rows that cannot be deleted are left for `reconcile`: the space is free already.
        """
        there = [self._folder.remove(space, name) for space, name in doomed]
        with contextlib.suppress(TierError):
            self._guarded.run(lambda index: index.delete(doomed))
        return any(there)
