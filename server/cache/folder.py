"""Where entry files lie, and how one appears, is read and goes as a whole.

DIR/FORMAT                          names this layout (format_file.py)
DIR/cache.db*, DIR/index.lock       the index (index.py); can be deleted at any time
DIR/manifest/ab/<hex>, content/...  one file per entry, found by name alone: a read needs no index
DIR/temp/<random>                   files being written
DIR/quarantine/                     the last few damaged or reported files, as evidence
DIR/recalled/<builder id>           recalled builders (../recalls.py)
DIR/reserve                         space to delete with when the disk is full
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from fuse_cache.server.cache.entry_file import (
    DamagedFileError,
    Header,
    encode_header,
    read_entry,
    read_header,
)
from fuse_cache.server.cache.files import NO_FILE_ERRNOS, Files
from fuse_cache.server.cache.filesystem import StoreFolderError, refuse_network
from fuse_cache.server.cache.format_file import check_format
from fuse_cache.server.cache.tier import NAME_BYTES, Entry, Space, Stored

FOLDER_OF = {Space.MANIFEST: "manifest", Space.CONTENT: "content"}
MAX_QUARANTINED = 32  # Files kept as evidence.
# Between a writer's open and its lock lie microseconds; a minute forgives a stopped machine.
TEMP_AGE_S = 60.0
FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
READ_ONLY_ERRNOS = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


class Folder:
    """The files of one store. Safe for threads and processes: each change is one rename or one unlink."""

    def __init__(self, root: Path, *, files: Files, reserve_bytes: int) -> None:
        self.root = str(root.absolute())
        self.files = files
        self.writable = False
        self._reserve_bytes = reserve_bytes
        self._reserve = os.path.join(self.root, "reserve")

    def open(self) -> None:
        """Make the folders and find out what is allowed here. A folder that may only be read is fine.

        Raises:
            StoreFolderError: network file system, other format, or no renames: it cannot be a store.
            OSError: it cannot be used now (does not exist and cannot be made, full, I/O error).
        """
        refuse_network(Path(self.root))
        self.writable = self._probe()
        if not self.writable:
            self.files.list(self.root)
        check_format(self)
        if self.writable:
            self.take_reserve()

    def path(self, space: Space, name: bytes) -> str:
        text = name.hex()
        return os.path.join(self.root, FOLDER_OF[space], text[:2], text)

    def read(self, space: Space, name: bytes, tier: str) -> Entry | None:
        """Return the entry or None. Raises: DamagedFileError, OSError (could not be read: an outage)."""
        path = self.path(space, name)
        # A file that was just renamed may not be visible at once everywhere: ENOENT is asked twice, then it
        # is a miss.
        for _ in range(2):
            with (
                contextlib.suppress(FileNotFoundError, NotADirectoryError),
                self._open_entry(path) as file,
            ):
                return read_entry(file, space, name, tier)
        return None

    def header(self, space: Space, name: bytes) -> Header | None:
        """Return what the file says about itself, or None. Raises: DamagedFileError, OSError."""
        path = self.path(space, name)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), self._open_entry(path) as file:
            header = read_header(file)
            if header.space is not space or header.name != name:
                raise DamagedFileError("the file is another entry's")
            return header
        return None

    def size(self, space: Space, name: bytes) -> int | None:
        """Return the size of the file, or None: there is none, or no file. Raises: OSError."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = self.files.stat(self.path(space, name))
            return status.st_size if stat.S_ISREG(status.st_mode) else None
        return None

    def write(self, space: Space, name: bytes, entry: Entry) -> int:
        """Make the file appear whole and return its size; on any error nothing is left behind. Raises:
        OSError.

        No fsync: a file torn by a power cut fails its digest and is a miss, and a fsync of 64 MiB can take
        seconds.
        """
        header = encode_header(space, name, entry)
        self.write_whole(self.path(space, name), header, entry.data)
        return len(header) + len(entry.data)

    def remove(self, space: Space, name: bytes) -> bool:
        """Unlink the file; tell whether there was one. Raises: OSError."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self.files.discard(self.path(space, name))
            return True
        return False

    def set_aside(self, space: Space, name: bytes) -> bool:
        """Move the file to quarantine/, which keeps the newest; tell if there was one. Raises: OSError."""
        aside = os.path.join(self.root, "quarantine")
        target = os.path.join(aside, f"{FOLDER_OF[space]}-{name.hex()}-{uuid.uuid4().hex[:8]}")
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            source = self.path(space, name)
            self.files.stat(source)
            try:
                self._replace(source, target)
            except OSError:  # Nowhere to put it: then it goes.
                self.files.discard(source)
            self.trim_quarantine(keep=MAX_QUARANTINED)
            return True
        return False

    def trim_quarantine(self, *, keep: int) -> None:
        """Delete the oldest files of quarantine/ until `keep` are left. Never raises."""
        aside = os.path.join(self.root, "quarantine")
        with contextlib.suppress(OSError):
            paths = [os.path.join(aside, text) for text in self.files.list(aside)]
            if len(paths) <= keep:
                return
            # st_ctime: when it was moved here.
            paths.sort(key=lambda path: self.files.stat(path).st_ctime, reverse=True)
            for path in paths[keep:]:
                self.files.discard(path)

    def shards(self, space: Space) -> list[str]:
        """Return the two-digit folders that exist. Raises: OSError (not ENOENT)."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(self.files.list(os.path.join(self.root, FOLDER_OF[space])))
        return []

    def shard_path(self, space: Space, shard: str) -> str:
        return os.path.join(self.root, FOLDER_OF[space], shard)

    def names(self, space: Space, shard: str) -> Iterator[bytes]:
        """Yield the names of this shard's files; those with other names are skipped. Raises: OSError."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for text in self.files.list(self.shard_path(space, shard)):
                with contextlib.suppress(ValueError):
                    name = bytes.fromhex(text)
                    if len(name) == NAME_BYTES and text.startswith(shard):
                        yield name

    def walk(self, space: Space) -> Iterator[Stored]:
        """Yield what the files say, without an index. Damaged ones are left to `read`. Raises: OSError."""
        for shard in self.shards(space):
            for name in self.names(space, shard):
                with contextlib.suppress(DamagedFileError):
                    header = self.header(space, name)
                    if header is not None:
                        yield Stored(name, header.file_bytes, header.meta)

    def dead_temps(self, *, now_s: float, age_s: float = TEMP_AGE_S) -> list[str]:
        """Return temp files whose writer is gone. Never raises."""
        temp = os.path.join(self.root, "temp")
        dead: list[str] = []
        with contextlib.suppress(OSError):
            for text in self.files.list(temp):
                path = os.path.join(temp, text)
                with contextlib.suppress(OSError):
                    if now_s - self.files.stat(path).st_mtime >= age_s and not self.files.has_writer(path):
                        dead.append(path)
        return dead

    def take_reserve(self) -> None:
        """Set space aside if there is plenty.

        Never raises: without a reserve the store works until the disk is full.
        """
        if not self._reserve_bytes:
            return
        with contextlib.suppress(OSError):
            if self.files.stat(self._reserve).st_size >= self._reserve_bytes:
                return
        with contextlib.suppress(OSError):
            if self.files.free_bytes(self.root) < 2 * self._reserve_bytes:
                return
            temp = os.path.join(self.root, "temp", uuid.uuid4().hex)
            try:
                with self._create(temp) as descriptor:
                    self.files.allocate(descriptor, self._reserve_bytes)
                    self._replace(temp, self._reserve)
            except OSError:
                self.files.unlink(temp)

    def free_reserve(self) -> None:
        """Give the reserve back to the file system, so that deleting can write what it must. Never raises."""
        with contextlib.suppress(OSError):
            self.files.unlink(self._reserve)

    def _open_entry(self, path: str) -> BinaryIO:
        """Open an entry's file. Raises: DamagedFileError (it is no file), OSError."""
        try:
            return self.files.open_read(path)
        except OSError as error:
            if error.errno not in NO_FILE_ERRNOS:
                raise
            raise DamagedFileError("something else than a file is in its place") from error

    def write_whole(self, path: str, *parts: bytes) -> None:
        """Make a file of these parts appear at once; on any error nothing is left behind. Raises: OSError."""
        temp = os.path.join(self.root, "temp", uuid.uuid4().hex)
        try:
            with self._create(temp) as descriptor:
                for part in parts:
                    self.files.write(descriptor, part)
                self._replace(temp, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self.files.unlink(temp)
            raise

    @contextlib.contextmanager
    def _create(self, path: str) -> Iterator[int]:
        with contextlib.ExitStack() as stack:
            try:
                descriptor = stack.enter_context(self.files.create(path))
            except FileNotFoundError:
                # A cleaner of temporary folders may take the folder at any moment: it is made again.
                self.files.make_dirs(os.path.dirname(path))
                descriptor = stack.enter_context(self.files.create(path))
            yield descriptor

    def _replace(self, source: str, target: str) -> None:
        for _ in range(3):  # Who removes empty folders may take a new one before the file is in it.
            try:
                self.files.replace(source, target)
                return
            except FileNotFoundError:
                self.files.make_dirs(os.path.dirname(target))
            except IsADirectoryError:
                self.files.discard(target)
        self.files.replace(source, target)

    def _probe(self) -> bool:
        """Try what every write needs: create, write, rename. False: this folder may only be read."""
        source = os.path.join(self.root, "temp", f"probe-{uuid.uuid4().hex}")
        target = source + "-renamed"
        try:
            self.files.make_dirs(self.root)  # Apart from its subfolder, so that it too is for this user only.
            self.files.make_dirs(os.path.join(self.root, "temp"))
            with self.files.create(source) as descriptor:
                self.files.write(descriptor, b"probe")
        except OSError as error:
            with contextlib.suppress(OSError):
                self.files.unlink(source)
            if error.errno in FULL_ERRNOS:
                self.free_reserve()
                return True  # Full, but ours: deletions and evictions will make room.
            if error.errno in READ_ONLY_ERRNOS and os.path.isdir(self.root):
                return False
            raise
        try:
            self.files.replace(source, target)
        except OSError as error:
            with contextlib.suppress(OSError):
                self.files.unlink(source)
            raise StoreFolderError(
                f"{self.root}: files cannot be renamed here ({os.strerror(error.errno or 0)}), so that "
                "entries cannot appear whole: give --store a folder on a local disk"
            ) from error
        with contextlib.suppress(OSError):
            self.files.unlink(target)
        return True
