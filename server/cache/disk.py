"""The tier that survives a restart: self-describing files, with an index that nothing depends on."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path

from fuse_cache.server.cache.database import PendingFile
from fuse_cache.server.cache.disk_errors import outage_of, write_error_of
from fuse_cache.server.cache.entry_file import DamagedFileError, encode_header
from fuse_cache.server.cache.files import Files
from fuse_cache.server.cache.filesystem import StoreFolderError
from fuse_cache.server.cache.folder import FULL_ERRNOS, Folder
from fuse_cache.server.cache.guarded_index import GuardedIndex
from fuse_cache.server.cache.index import Index
from fuse_cache.server.cache.room import Room
from fuse_cache.server.cache.tier import (
    CorruptEntryError,
    Entry,
    Space,
    Stored,
    Tier,
    TierError,
    TierUnavailableError,
    Usage,
    WriteLostError,
)

log = logging.getLogger(__name__)

# What deleting needs on a full disk: SQLite's WAL takes up to 1,000 pages of 4 KiB before they are folded in,
# and folding needs as much again in the database.
RESERVE_BYTES = 8 * 1024 * 1024
# Half a minute of work for 100,000 entries, for what only crashes leave behind.
RECONCILE_PERIOD_S = 6 * 3600.0
REOPEN_AFTER_S = 5.0  # A folder that could not be opened is tried again by the first call after this.


class DiskTier(Tier):
    """Entries in one local folder, which several daemons may share.

    A read takes the file by name and asks no index, so that a damaged or locked database costs no hit. Room
    is made by `eviction.choose_victims`; `limit_bytes` is a hard cap over all entry files (reserve, index and
    quarantine come on top). Deleting unlinks the file before its row; what a crash leaves, `reconcile` finds.
    """

    def __init__(
        self,
        root: Path,
        *,
        limit_bytes: int,
        name: str = "disk",
        reserve_bytes: int = RESERVE_BYTES,
        files: Files | None = None,
        now_s: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the folder, or note why it cannot be used now.

        Raises:
            StoreFolderError: it never can be: network file system, another format, or no renames.
        """
        if limit_bytes <= 0:
            raise ValueError(f"limit_bytes must be positive, not {limit_bytes}")
        self.name = name
        self.folder = Folder(root, files=files or Files(), reserve_bytes=reserve_bytes)
        self.guarded = GuardedIndex(self.folder, tier=name, now_s=now_s)
        self._room = Room(self.folder, self.guarded, limit_bytes=limit_bytes, now_s=now_s)
        self._monotonic_s = monotonic_s
        # Plain counters and notes: written by single assignments, read by `usage` and `health`; a lost count
        # is harmless.
        self._quarantined = 0
        self._lost_writes = 0
        self._lost = ""  # why the last write was lost, "" since one was kept
        self._walked = Usage()  # what a read-only folder holds, as maintenance last saw it
        self._outage = ""  # why the folder cannot be used at all, "" while it can
        self._retry_at_s = 0.0
        self._reconcile_at_s = 0.0
        self._open()

    def get(self, space: Space, name: bytes) -> Entry | None:
        self._ready()
        try:
            entry = self.folder.read(space, name, self.name)
        except DamagedFileError as error:
            raise CorruptEntryError(self.name, str(error)) from error
        except OSError as error:
            raise outage_of(self.name, error) from error
        if entry is not None:
            self._room.uses.note(space, (name,))
        return entry

    def put(self, space: Space, name: bytes, entry: Entry) -> None:
        try:
            self._put(space, name, entry)
            self._lost = ""
        except WriteLostError as error:
            self._lost, self._lost_writes = error.reason, self._lost_writes + 1
            raise

    def contains(self, space: Space, name: bytes) -> bool:
        self._ready()
        try:
            return self.folder.size(space, name) is not None
        except OSError as error:
            raise outage_of(self.name, error) from error

    def delete(self, space: Space, name: bytes) -> bool:
        self._ready_to_write()
        content = b""
        # Without its header, the content is left to `reconcile`.
        with contextlib.suppress(DamagedFileError, OSError):
            header = self.folder.header(space, name)
            content = header.meta.content if header is not None else b""
        try:
            done = self._room.delete([(space, name)])
            if content and not self._is_named(content):
                self._room.delete([(Space.CONTENT, content)])
        except OSError as error:
            raise write_error_of(self.name, error) from error
        return done

    def iterate(self, space: Space) -> Iterator[Stored]:
        self._ready()
        with contextlib.suppress(TierError):
            if self.folder.writable and self.guarded.complete():
                yield from self.rows(space)
                return
        # No index, or one that does not know all files yet: they say the same, more slowly.
        yield from self._walk(space)

    def naming(self, content: bytes) -> list[bytes]:
        if not self.contains(Space.CONTENT, content):
            return []  # Whoever asks for what is not there costs one call of stat.
        with contextlib.suppress(TierError):
            if self.folder.writable and self.guarded.complete():
                return self.guarded.run(lambda index: index.naming(content))
        return [stored.name for stored in self._walk(Space.MANIFEST) if stored.meta.content == content]

    def quarantine(self, space: Space, name: bytes) -> bool:
        self._ready_to_write()
        try:
            done = self.folder.set_aside(space, name)
        except OSError as error:
            raise write_error_of(self.name, error) from error
        with contextlib.suppress(TierError):
            self.guarded.run(lambda index: index.delete([(space, name)]))
        self._quarantined += done
        return done

    def touch(self, space: Space, names: Collection[bytes]) -> None:
        self._room.uses.note(space, names)

    def health(self) -> str:
        if self._outage:
            return f"{self.name}: {self._outage}"
        if not self.folder.writable:
            return f"{self.name}: {self.folder.root} is read-only: hits only, new artifacts are not kept"
        trouble = self._lost or self.guarded.trouble
        return f"{self.name}: {trouble}" if trouble else ""

    def usage(self) -> Usage:
        entries, size_bytes = self._walked.entries, self._walked.size_bytes
        if self.folder.writable and not self._outage:
            with contextlib.suppress(TierError):
                entries = self.guarded.run(lambda index: index.count(Space.MANIFEST))
                size_bytes = self.guarded.run(lambda index: index.total_bytes())
        return Usage(
            entries=entries,
            size_bytes=size_bytes,
            limit_bytes=self._room.limit_bytes,
            evictions=self._room.evictions,
            quarantined=self._quarantined,
            lost_writes=self._lost_writes,
            index_rebuilds=self.guarded.rebuilds,
        )

    def maintain(self) -> None:
        try:
            self._ready()
            if self.folder.writable:
                self._room.fold_uses()
                if self._monotonic_s() >= self._reconcile_at_s:
                    self.guarded.reconcile(gently=True)
                    self._room.make(0)
                    self._reconcile_at_s = self._monotonic_s() + RECONCILE_PERIOD_S
                self.folder.take_reserve()
            else:
                sizes = {space: [stored.size_bytes for stored in self._walk(space)] for space in Space}
                size_bytes = sum(map(sum, sizes.values()))
                self._walked = Usage(entries=len(sizes[Space.MANIFEST]), size_bytes=size_bytes)
        except (TierError, OSError) as error:
            if not self.guarded.is_closed:
                log.warning("store not maintained", extra={"reason": str(error)})

    def close(self) -> None:
        if self.folder.writable and not self._outage:
            with contextlib.suppress(TierError):
                self._room.fold_uses()
        self.guarded.close()

    def rows(self, space: Space) -> Iterator[Stored]:
        """Yield what the index says; `iterate` also works without one. Raises: TierError."""
        after = b""
        while page := self.guarded.run(partial(Index.page, space=space, after=after)):
            yield from page
            after = page[-1].name

    def _put(self, space: Space, name: bytes, entry: Entry) -> None:
        self._ready_to_write()
        size_bytes = len(encode_header(space, name, entry)) + len(entry.data)
        if size_bytes > self._room.limit_bytes:
            raise WriteLostError(
                self.name, f"{size_bytes} bytes are more than the store's {self._room.limit_bytes}"
            )
        # If it is not: the cap holds for what the index knows, until the rest is read in.
        self.guarded.complete()
        if space is Space.CONTENT and self._has_content(name, size_bytes):
            return
        try:
            self._write(space, name, entry, size_bytes)
        except OSError as error:
            if error.errno not in FULL_ERRNOS:
                raise write_error_of(self.name, error) from error
            self._write_again(space, name, entry, size_bytes)
        self.folder.take_reserve()

    def _write_again(self, space: Space, name: bytes, entry: Entry, size_bytes: int) -> None:
        """Others filled the disk, below our cap: make room for this one write, or lose it."""
        try:
            self.folder.free_reserve()
            self.folder.trim_quarantine(keep=0)
            self._room.make(size_bytes)
            self._write(space, name, entry, size_bytes)
        except OSError as error:
            raise write_error_of(self.name, error) from error

    def _write(self, space: Space, name: bytes, entry: Entry, size_bytes: int) -> None:
        pending = PendingFile(lambda: self.folder.write(space, name, entry), entry.meta)
        try:
            with self._room.taken(size_bytes):
                self.guarded.run(lambda index: index.put(space, name, pending))
        except TierError:
            # Its row could not be written: a file that no accounting knows would break the cap.
            with contextlib.suppress(OSError):
                self.folder.remove(space, name)
            raise

    def _has_content(self, digest: bytes, size_bytes: int) -> bool:
        """Tell whether a file of this content is there already: same digest and size, same bytes."""
        try:
            there = self.folder.size(Space.CONTENT, digest) == size_bytes
        except OSError:
            return False
        if there and self.guarded.run(lambda index: index.has(Space.CONTENT, digest)):
            self._room.uses.note(Space.CONTENT, (digest,))
            return True
        return False

    def _is_named(self, content: bytes) -> bool:
        """Tell whether a manifest may name it. An index that does not know all files cannot rule it out."""
        return not self.guarded.complete() or bool(self.guarded.run(lambda index: index.naming(content)))

    def _walk(self, space: Space) -> Iterator[Stored]:
        try:
            yield from self.folder.walk(space)
        except OSError as error:
            raise outage_of(self.name, error) from error

    def _open(self) -> None:
        try:
            self.folder.open()
            self._outage = ""
        except OSError as error:
            self._outage = f"{error.filename or self.folder.root} cannot be used: {error.strerror or error}"
            self._retry_at_s = self._monotonic_s() + REOPEN_AFTER_S
            return
        if self.folder.writable:
            with contextlib.suppress(TierError):
                self.guarded.run(lambda index: index.total_bytes())

    def _ready(self) -> None:
        if self._outage and self._monotonic_s() >= self._retry_at_s:
            try:
                self._open()
            except StoreFolderError as error:
                self._outage, self._retry_at_s = str(error), self._monotonic_s() + REOPEN_AFTER_S
        if self._outage:
            raise TierUnavailableError(self.name, self._outage)

    def _ready_to_write(self) -> None:
        self._ready()
        if not self.folder.writable:
            raise WriteLostError(self.name, "the store folder is read-only")
