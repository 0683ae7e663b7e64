"""The first tier: entries in this process, bounded by bytes, the least recently used goes first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator

from fuse_cache.server.cache.tier import Entry, Space, Stored, Tier, Usage, WriteLostError

# What one entry costs beside its bytes: bytes object 33, name 65, Entry 56, Meta 64 + facts about 120, dict
# slots about 150.
OVERHEAD_BYTES = 512


class MemoryTier(Tier):
    """A bytes-bounded LRU. What goes in is trusted: it was verified on the way in, and nobody else writes
    here.

    Recency alone decides here: what falls out is still on disk, so that a loss costs a file read and not a
    compilation.
    """

    def __init__(self, *, limit_bytes: int, name: str = "memory") -> None:
        if limit_bytes < 0:
            raise ValueError(f"limit_bytes must not be negative, not {limit_bytes}")
        self.name = name
        self._limit_bytes = limit_bytes
        self._lock = (
            threading.Lock()
        )  # Guards all below. Never held during I/O; no other lock is taken under it.
        self._entries: OrderedDict[tuple[Space, bytes], Entry] = OrderedDict()
        self._namers: dict[
            bytes, set[bytes]
        ] = {}  # content digest -> keys of the manifests here that name it
        self._size_bytes = 0
        self._evictions = 0

    def get(self, space: Space, name: bytes) -> Entry | None:
        with self._lock:
            entry = self._entries.get((space, name))
            if entry is not None:
                self._entries.move_to_end((space, name))
            return entry

    def put(self, space: Space, name: bytes, entry: Entry) -> None:
        size_bytes = _size(entry)
        with self._lock:
            self._drop(space, name)
            # An entry that would empty the tier for itself is better read from disk.
            if 2 * size_bytes > self._limit_bytes:
                raise WriteLostError(
                    self.name, f"entry of {size_bytes} bytes is over half the limit of {self._limit_bytes}"
                )
            self._entries[space, name] = Entry(entry.data, entry.meta, self.name)
            self._size_bytes += size_bytes
            if space is Space.MANIFEST and entry.meta.content:
                self._namers.setdefault(entry.meta.content, set()).add(name)
            while self._size_bytes > self._limit_bytes:
                (oldest_space, oldest_name), _ = next(iter(self._entries.items()))
                self._drop(oldest_space, oldest_name)
                self._evictions += 1

    def contains(self, space: Space, name: bytes) -> bool:
        with self._lock:
            return (space, name) in self._entries

    def delete(self, space: Space, name: bytes) -> bool:
        with self._lock:
            entry = self._drop(space, name)
            if entry is None:
                return False
            if space is Space.MANIFEST and entry.meta.content and entry.meta.content not in self._namers:
                self._drop(Space.CONTENT, entry.meta.content)
            return True

    def iterate(self, space: Space) -> Iterator[Stored]:
        with self._lock:
            found = [
                Stored(name, len(entry.data), entry.meta)
                for (kind, name), entry in self._entries.items()
                if kind is space
            ]
        yield from found

    def naming(self, content: bytes) -> list[bytes]:
        with self._lock:
            there = (Space.CONTENT, content) in self._entries
            return list(self._namers.get(content, ())) if there else []

    def usage(self) -> Usage:
        with self._lock:
            entries = sum(1 for space, _ in self._entries if space is Space.MANIFEST)
            return Usage(
                entries=entries,
                size_bytes=self._size_bytes,
                limit_bytes=self._limit_bytes,
                evictions=self._evictions,
            )

    def close(self) -> None:
        with self._lock:
            self._entries.clear()
            self._namers.clear()
            self._size_bytes = 0

    def _drop(self, space: Space, name: bytes) -> Entry | None:
        """Forget one entry. Called with the lock held."""
        entry = self._entries.pop((space, name), None)
        if entry is None:
            return None
        self._size_bytes -= _size(entry)
        if space is Space.MANIFEST and entry.meta.content:
            namers = self._namers.get(entry.meta.content, set())
            namers.discard(name)
            if not namers:
                self._namers.pop(entry.meta.content, None)
        return entry


def _size(entry: Entry) -> int:
    return len(entry.data) + len(entry.meta.facts) + OVERHEAD_BYTES
