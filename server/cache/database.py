"""The SQLite file under the index: opened through diskcache, replaced when it is broken."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from typing import Any

import diskcache
from diskcache.core import MODE_BINARY

from fuse_cache.server.cache.entry_file import seal_meta
from fuse_cache.server.cache.index_errors import IndexBrokenError, translated
from fuse_cache.server.cache.tier import Meta

DATABASE_SUFFIXES = ("", "-wal", "-shm")
SETTINGS = {
    "eviction_policy": "none",
    "cull_limit": 0,
    "size_limit": 2**62,  # Unused with cull_limit 0; ours is in disk.py.
    "statistics": 0,
    "tag_index": 1,  # The tag of a manifest's row is the row key of the content that it names.
    "disk_min_file_size": 0,
    "sqlite_auto_vacuum": 0,  # Pages are used again; moving them at each commit only makes deletion dearer.
    "sqlite_cache_size": 256,  # Pages of 4 KiB, per thread: 1 MiB instead of diskcache's 32.
    "sqlite_synchronous": 0,  # No fsync: what a power cut ruins is made again from the files.
    "sqlite_mmap_size": 0,  # A mapped database that somebody truncates kills the process with SIGBUS.
}


class PendingFile:
    """What is handed to diskcache as a value: a file that is written when it asks, and what its row says."""

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
        return value.write(), MODE_BINARY, None, sqlite3.Binary(seal_meta(value.meta))

    def fetch(self, mode: int, filename: str, value: Any, read: bool) -> bytes:
        raise NotImplementedError("entries are read by name (folder.py), never through the index")

    def remove(self, file_path: str) -> None:
        """Keep the file: a row's file has the same name before and after an update, and deletions unlink
        before the row.
        """


class Database:
    """One database that threads and processes share. Every method raises the errors of index_errors.py.

    When another process replaced it (after damage), the next call here opens the new one.
    """

    def __init__(self, root: str, *, timeout_s: float) -> None:
        self._root = root
        self._path = os.path.join(root, "cache.db")
        self._timeout_s = timeout_s
        # Guards the next three. Held while the database is opened, by nothing else.
        self._lock = threading.Lock()
        self._cache: Any = None
        self._inode = 0
        self._complete = False

    def cache(self) -> Any:
        """Return the open diskcache.Cache. Its own calls must be made within `translated()`."""
        with self._lock:
            inode = _inode_of(self._path)
            if self._cache is None or inode != self._inode or not inode:
                self._drop()
                self._inode = inode  # Known to `rebuild` even when opening fails.
                self._cache = diskcache.Cache(self._root, timeout=self._timeout_s, disk=RawDisk, **SETTINGS)
                self._inode = _inode_of(self._path)
            return self._cache

    def all(self, sql: str, *values: object) -> list[Any]:
        with translated():
            return list(self.cache()._sql(sql, values).fetchall())

    def one(self, sql: str, *values: object) -> Any:
        rows = self.all(sql, *values)
        if not rows:
            raise IndexBrokenError(f"no row for {sql!r}")
        return rows[0][0]

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Callable[..., Any]]:
        """Yield what executes statements; all of them happen, or none."""
        with translated():
            cache = self.cache()
            with cache.transact():
                yield cache._sql

    def is_complete(self) -> bool:
        """Tell whether the files were read in since the database was made: before that, it knows only new
        ones.

        A row in the database says so, which a process that dies half-way never wrote.
        """
        sql = "SELECT COUNT(*) FROM Settings WHERE key = 'fuse_cache_complete' AND value = 1"
        with translated():
            self.cache()  # May find another database, or none.
        if not self._complete:
            self._complete = self.one(sql) == 1
        return self._complete

    def set_complete(self) -> None:
        with self.transaction() as execute:
            execute("INSERT OR REPLACE INTO Settings VALUES ('fuse_cache_complete', 1)")
        for suffix in DATABASE_SUFFIXES:
            with contextlib.suppress(
                OSError
            ):  # What was broken has been made good: its space is of more use.
                os.unlink(self._path + ".broken" + suffix)

    def verify(self) -> None:
        """Read all pages and compare tables with their indexes (some seconds for 100,000 entries)."""
        found = self.one("PRAGMA integrity_check(1)")
        if found != "ok":
            raise IndexBrokenError(str(found))

    def rebuild(self) -> bool:
        """Put an empty database in the place of a broken one; False when another process has done so."""
        with open(os.path.join(self._root, "index.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # Released when the file is closed.
            with self._lock:
                broken = self._inode
                self._drop()
                if broken and broken != _inode_of(self._path):
                    return False
                for suffix in DATABASE_SUFFIXES:
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(self._path + suffix, self._path + ".broken" + suffix)
            with translated():
                self.cache()
        return True

    def release(self) -> None:
        """Close the connection of this thread, which is about to end; other threads keep theirs."""
        with self._lock:
            if self._cache is not None:
                self._cache.close()

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        """Forget the open database. Called with the lock held."""
        if self._cache is not None:
            with contextlib.suppress(Exception):  # It may be the broken one.
                self._cache.close()
        self._cache = None
        self._inode = 0
        self._complete = False


def _inode_of(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0
