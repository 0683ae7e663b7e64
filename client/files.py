"""Files of the client's own folder: they appear whole, and a folder that cannot be written costs one
warning."""

from __future__ import annotations

import logging
from pathlib import Path
from uuid import uuid4

_log = logging.getLogger("fuse_cache.client")
_warned: set[Path] = set()


def write_whole(path: Path, data: bytes, *, room: Path | None = None) -> bool:
    """Make `path` hold `data`, so that no reader ever sees a part of it. False: it could not be written.

    Parents are made, for this uid only. `room` is the folder that a warning names.
    """
    temp = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            temp.write_bytes(data)  # No fsync: a file torn by a crash fails its digest, which is a miss.
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
