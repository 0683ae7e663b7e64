"""The index over the entry files: sizes, use, and which manifests name a content. On `diskcache`; nothing in
it is needed to read.

diskcache gives the table, its upkeep across threads and processes, and the write path (file first, then row).
Its own choices are switched off: no pickle, no eviction or culling, no reads of values through it, no
deletion of files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable, Collection
from typing import Any

import diskcache
from diskcache.core import MODE_BINARY

from fuse_cache.server.cache.entry_file import decode_meta, encode_meta
from fuse_cache.server.cache.eviction import Candidate
from fuse_cache.server.cache.index_errors import IndexBrokenError, translated
from fuse_cache.server.cache.tier import Meta, Space, Stored

PAGE_ROWS = 1_000  # Rows per query of a listing: some milliseconds.
SETTINGS = {
    "eviction_policy": "none",
    "cull_limit": 0,
    "size_limit": 2**62,  # Unused with cull_limit 0; ours is in disk.py.
    "statistics": 0,
    "tag_index": 1,  # The tag of a manifest's row is the row key of the content that it names.
    "disk_min_file_size": 0,
    "sqlite_auto_vacuum": 0,  # Pages are used again; moving them at each commit only makes deletion dearer.
    "sqlite_cache_size": 256,  # Pages of 4 KiB, per thread: 1 MiB instead of diskcache's 32.
    "sqlite_mmap_size": 0,  # A mapped database that somebody truncates kills the process with SIGBUS.
}


class PendingFile:
    """The value that is handed to diskcache: a file to be written when it asks, and what its row shall say.
    """

    def __init__(self, write: Callable[[], int], meta: Meta) -> None:
        self.write = write
        self.meta = meta


class RawDisk(diskcache.Disk):  # type: ignore[misc]  # diskcache has no types
    """Row keys are bytes, values are our own files.

    Nothing that comes out of the database is ever unpickled.
    """

    def __init__(self, directory: str, **_: object) -> None:
        super().__init__(directory, min_file_size=0)

    def put(self, key: bytes) -> tuple[sqlite3.Binary, bool]:
        return sqlite3.Binary(key), True

    def get(self, key: Any, raw: Any) -> bytes:
        del raw  # A row that says "pickled" was not written by us.
        return bytes(key) if isinstance(key, bytes) else b""

    def store(
        self, value: PendingFile, read: bool, key: bytes = b""
    ) -> tuple[int, int, None, sqlite3.Binary]:
        """Write the file. The row needs no file name: it follows from the key (folder.py)."""
        del read, key
        return value.write(), MODE_BINARY, None, sqlite3.Binary(encode_meta(value.meta))

    def fetch(self, mode: int, filename: str, value: Any, read: bool) -> bytes:
        raise NotImplementedError("entries are read by name (folder.py), never through the index")

    def remove(self, file_path: str) -> None:
        """Keep the file: a row's file has the same name before and after an update, and deletions unlink
        before the row.
        """


class Index:
    """The rows of one store folder. Safe for threads and processes. Every method raises the Index errors
    above.

    When another process replaced the database (after damage), the next call here opens the new one.
    """

    def __init__(self, root: str, *, timeout_s: float = 2.0) -> None:
        self._root = root
        self._path = os.path.join(root, "cache.db")
        self._timeout_s = timeout_s
        # Guards the next two. Held while the database is opened, by nothing else.
        self._lock = threading.Lock()
        self._cache: Any = None
        self._inode = 0
        # True from a start without a database, or a rebuild, until the files were read in (reconcile.py).
        self.fresh = False

    def put(self, space: Space, name: bytes, pending: PendingFile) -> None:
        """Let `pending` write its file, then write its row.

        An OSError of the file is passed on: then there is neither.
        """
        with translated():
            self._open().set(row_key(space, name), pending, tag=_tag(pending.meta))

    def delete(self, rows: Collection[tuple[Space, bytes]]) -> None:
        """Delete rows. Their files are the caller's to unlink, before."""
        keys = [(row_key(space, name),) for space, name in rows]
        with translated():
            cache = self._open()
            with cache.transact():
                for key in keys:
                    cache._sql("DELETE FROM Cache WHERE key = ? AND raw = 1", key)

    def touch(self, uses: dict[tuple[Space, bytes], tuple[float, int]]) -> None:
        """Fold in uses: row -> (time of the last one, how many)."""
        with translated():
            cache = self._open()
            with cache.transact():
                for (space, name), (used_unix_s, count) in uses.items():
                    cache._sql(
                        "UPDATE Cache SET access_time = ?, access_count = access_count + ? "
                        "WHERE key = ? AND raw = 1",
                        (used_unix_s, count, row_key(space, name)),
                    )

    def total_bytes(self) -> int:
        """Return the size of all indexed files. diskcache's triggers keep it, for all processes at once."""
        return int(self._one("SELECT value FROM Settings WHERE key = 'size'"))

    def recount(self) -> None:
        """Set the total right: the sum that the triggers start from may have been damaged."""
        with translated():
            cache = self._open()
            with cache.transact():
                cache._sql(
                    "UPDATE Settings SET value = (SELECT COALESCE(SUM(size), 0) FROM Cache) "
                    "WHERE key = 'size'"
                )

    def count(self, space: Space) -> int:
        low, high = _bounds(space)
        return int(self._one("SELECT COUNT(*) FROM Cache WHERE key >= ? AND key < ?", low, high))

    def page(self, space: Space, after: bytes) -> list[Stored]:
        """Return the next rows of a listing, by name; empty at its end. No snapshot is held between pages."""
        _, high = _bounds(space)
        sql = (
            "SELECT key, size, value FROM Cache WHERE key > ? AND key < ? AND length(key) = 33 AND raw = 1 "
            "ORDER BY key LIMIT ?"
        )
        with translated():
            return [
                Stored(bytes(key)[1:], int(size_bytes), decode_meta(bytes(value)))
                for key, size_bytes, value in self._all(sql, space.value + after, high, PAGE_ROWS)
            ]

    def names(self, space: Space, shard: str) -> dict[bytes, tuple[int, float]]:
        """Return name -> (size, when its row was written) for names that begin with these two hex digits."""
        first = bytes.fromhex(shard)
        low = space.value + first
        high = space.value + bytes([first[0] + 1]) if first[0] < 255 else bytes([space.value[0] + 1])
        page = self._all("SELECT key, size, store_time FROM Cache WHERE key >= ? AND key < ?", low, high)
        return {bytes(key)[1:]: (int(size), float(stored or 0.0)) for key, size, stored in page}

    def naming(self, content: bytes) -> list[bytes]:
        """Return the keys of the manifests that name this content."""
        page = self._all("SELECT key FROM Cache WHERE tag = ?", row_key(Space.CONTENT, content))
        return [bytes(key)[1:] for (key,) in page]

    def named_by(self, key: bytes) -> bytes:
        """Return the digest of the content that this manifest names, or b""."""
        page = self._all("SELECT tag FROM Cache WHERE key = ? AND raw = 1", row_key(Space.MANIFEST, key))
        return bytes(page[0][0])[1:] if page and page[0][0] is not None else b""

    def has(self, space: Space, name: bytes) -> bool:
        return bool(self._all("SELECT 1 FROM Cache WHERE key = ? AND raw = 1", row_key(space, name)))

    def candidates(self, *, unnamed_before_s: float) -> list[Candidate]:
        """Return what could be evicted, by row key: each content (its manifests go with it), and manifests
        without content.

        A content that no manifest names may be half of a publish that is under way: it counts from
        `unnamed_before_s` on.
        """
        contents = (
            "SELECT c.key, c.size, c.value, c.access_time FROM Cache c WHERE c.key >= ? AND c.key < ? "
            "AND (c.store_time < ? OR EXISTS (SELECT 1 FROM Cache m WHERE m.tag = c.key))"
        )
        manifests = (
            "SELECT m.key, m.size, m.value, m.access_time FROM Cache m WHERE m.key >= ? AND m.key < ? "
            "AND NOT EXISTS (SELECT 1 FROM Cache c WHERE c.key = m.tag AND c.raw = 1)"
        )
        pages = self._all(contents, *_bounds(Space.CONTENT), unnamed_before_s)
        pages += self._all(manifests, *_bounds(Space.MANIFEST))
        with translated():
            return [
                Candidate(bytes(key), int(size_bytes), decode_meta(bytes(value)).cost_s, float(used or 0.0))
                for key, size_bytes, value, used in pages
            ]

    def unnamed(self, *, before_s: float) -> list[bytes]:
        """Return contents written before then that no manifest names: a publish that never ended, or a
        quarantine.
        """
        sql = (
            "SELECT c.key FROM Cache c WHERE c.key >= ? AND c.key < ? AND c.store_time < ? "
            "AND NOT EXISTS (SELECT 1 FROM Cache m WHERE m.tag = c.key)"
        )
        return [bytes(key)[1:] for (key,) in self._all(sql, *_bounds(Space.CONTENT), before_s)]

    def dangling(self, *, before_s: float) -> list[bytes]:
        """Return manifests written before then whose content is not there: they can only mislead."""
        sql = (
            "SELECT m.key FROM Cache m WHERE m.key >= ? AND m.key < ? AND m.store_time < ? "
            "AND m.tag IS NOT NULL AND NOT EXISTS (SELECT 1 FROM Cache c WHERE c.key = m.tag AND c.raw = 1)"
        )
        return [bytes(key)[1:] for (key,) in self._all(sql, *_bounds(Space.MANIFEST), before_s)]

    def adopt(self, found: Collection[tuple[Space, Stored, float]]) -> None:
        """Write rows for files that are there already: (space, what, when the file was written)."""
        with translated():
            cache = self._open()
            with cache.transact():
                for space, stored, written_unix_s in found:
                    key = row_key(space, stored.name)
                    pending = PendingFile(_size_of(stored), stored.meta)
                    cache.set(key, pending, tag=_tag(stored.meta))
                    cache._sql(
                        "UPDATE Cache SET store_time = ?, access_time = ? WHERE key = ? AND raw = 1",
                        (written_unix_s, written_unix_s, key),
                    )

    def rebuild(self) -> bool:
        """Put an empty database in the place of a broken one; False when another process did that meanwhile.
        """
        with open(os.path.join(self._root, "index.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # Released when the file is closed.
            with self._lock:
                broken = self._inode
                self._drop()
                if broken and broken != _inode_of(self._path):
                    return False
                for suffix in ("", "-wal", "-shm"):
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(self._path + suffix, self._path + ".broken" + suffix)
            with translated():
                self._open()
        self.fresh = True
        return True

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _open(self) -> Any:
        with self._lock:
            inode = _inode_of(self._path)
            if self._cache is None or inode != self._inode or not inode:
                self._drop()
                self._inode = inode  # Known to `rebuild` even when opening fails.
                self._cache = diskcache.Cache(self._root, timeout=self._timeout_s, disk=RawDisk, **SETTINGS)
                self._inode = _inode_of(self._path)
                self.fresh = self.fresh or not inode
            return self._cache

    def _drop(self) -> None:
        """Forget the open database. Called with the lock held."""
        if self._cache is not None:
            with contextlib.suppress(Exception):  # It may be the broken one.
                self._cache.close()
        self._cache = None
        self._inode = 0

    def _one(self, sql: str, *values: object) -> Any:
        rows = self._all(sql, *values)
        if not rows:
            raise IndexBrokenError(f"no row for {sql!r}")
        return rows[0][0]

    def _all(self, sql: str, *values: object) -> list[Any]:
        with translated():
            return list(self._open()._sql(sql, values).fetchall())


def row_key(space: Space, name: bytes) -> bytes:
    return space.value + name


def parse_row_key(key: bytes) -> tuple[Space, bytes]:
    return Space(key[:1]), key[1:]


def _tag(meta: Meta) -> sqlite3.Binary | None:
    return sqlite3.Binary(row_key(Space.CONTENT, meta.content)) if meta.content else None


def _size_of(stored: Stored) -> Callable[[], int]:
    return lambda: stored.size_bytes


def _bounds(space: Space) -> tuple[bytes, bytes]:
    return space.value, bytes([space.value[0] + 1])


def _inode_of(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0
