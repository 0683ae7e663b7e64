"""Files of the client's own folder: they appear whole, are read with care (others may have written them), and
a folder that cannot be written costs one warning."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from uuid import uuid4

_log = logging.getLogger("fuse_cache.client")
_warned: set[Path] = set()


def read_whole(path: Path, limit_bytes: int, *, others_may_write: bool = True) -> bytes:
    """Return what a file holds; nothing where it is no plain file (a pipe, a device) or beyond the limit.

    Without `others_may_write` also nothing where somebody else than this uid and root could have written it.

    Raises:
        OSError: it is not there, or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > limit_bytes:
            return b""
        if not others_may_write and (found.st_uid not in (os.getuid(), 0) or found.st_mode & 0o022):
            return b""
        return file.read(limit_bytes)


def write_whole(path: Path, data: bytes, *, room: Path | None = None) -> bool:
    """Make `path` hold `data`, so that no reader ever sees a part of it. False: it could not be written.

    Parents are made, for this uid only. `room` is the folder that a warning names.
    """
    temp = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            # For nobody else to write. No fsync: a file torn by a crash fails its digest, which is a miss.
            with os.fdopen(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
                file.write(data)
            temp.replace(path)
        except OSError:
            temp.unlink(missing_ok=True)
            raise
    except OSError as error:
        warn_once(
            room or path.parent, f"cannot be written ({error.strerror or error}): nothing new is kept there"
        )
        return False
    return True


def warn_once(folder: Path, message: str) -> None:
    """Log a warning about `folder`, once in this process."""
    if folder not in _warned:
        _warned.add(folder)
        _log.warning("%s %s", folder, message)
