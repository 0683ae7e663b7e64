"""DIR/FORMAT: which layout the files of a store folder have."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from itertools import islice
from typing import TYPE_CHECKING

from fuse_cache.server.cache.entry_file import DamagedFileError
from fuse_cache.server.cache.files import NO_FILE_ERRNOS
from fuse_cache.server.cache.filesystem import StoreFolderError
from fuse_cache.server.cache.tier import Space

if TYPE_CHECKING:
    from fuse_cache.server.cache.folder import Folder

log = logging.getLogger(__name__)

FORMAT = b"fuse-cache store 1\n"
LOOKED_AT = 64  # Entries per space that are asked for their format, where FORMAT does not say it.


def check_format(folder: Folder) -> None:
    """Hold the folder's format against ours, and write ours down where none is.

    A power cut may leave FORMAT empty or cut short. Then it says nothing, and what the entries say of
    themselves is enough: those of another format would all be taken for damaged, and set aside.

    Raises:
        StoreFolderError: the folder is of another format.
        OSError: it cannot be read now.
    """
    path = os.path.join(folder.root, "FORMAT")
    found, is_there = b"", True
    try:
        with folder.files.open_read(path) as file:
            found = file.read(256)
    except OSError as error:
        if error.errno not in NO_FILE_ERRNOS | {errno.ENOENT}:
            raise
        is_there = error.errno != errno.ENOENT
    if found == FORMAT:
        return
    if not FORMAT.startswith(found.rstrip(b"\0")):
        raise StoreFolderError(
            f"{folder.root} holds a store of another format ({found[:40]!r}): give --store another folder"
        )
    if not _entries_are_ours(folder):
        raise StoreFolderError(
            f"{folder.root} holds entries that this version cannot read, and {path} does not say of which "
            "version they are: give --store another folder, or empty this one"
        )
    if is_there:
        log.warning("store marker damaged", extra={"file": path, "found": repr(found[:40])})
    if folder.writable:
        with contextlib.suppress(OSError):  # A full disk: written at the next start.
            folder.write_whole(path, FORMAT)


def _entries_are_ours(folder: Folder) -> bool:
    """Tell whether an entry of our format is here, or none at all."""
    seen = False
    for space in Space:
        names = (name for shard in folder.shards(space) for name in folder.names(space, shard))
        for name in islice(names, LOOKED_AT):
            seen = True
            with contextlib.suppress(DamagedFileError):
                if folder.header(space, name) is not None:
                    return True
    return not seen
