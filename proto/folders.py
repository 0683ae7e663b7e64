"""What lies in a folder, listed again only when the folder changed: one call of stat instead of a listing.

For what looks at the same folders again and again (source stamps, installed wheels). Thread-safe.
"""

from __future__ import annotations

import os
import time
from typing import Final, NamedTuple

# A clock ticks every 4 ms or so, on some file systems every 2 s: a folder that changed less than this ago may
# change once more without looking any different, so its listing is not kept yet.
_SETTLED_NS: Final = 5_000_000_000


class Listing(NamedTuple):
    """Names in a folder, sorted. A link is a file, whatever it leads to."""

    files: tuple[str, ...]
    folders: tuple[str, ...]


_NOTHING: Final = Listing((), ())
_kept: dict[str, tuple[tuple[int, int, int, int], Listing]] = {}


def listing(folder: str) -> Listing:
    """Return what lies in `folder`; nothing where it is no folder, or not one that this uid may read."""
    try:
        info = os.stat(folder)
        # The time of the last change cannot be set back, as that of the last modification can.
        stamp = info.st_dev, info.st_ino, info.st_mtime_ns, info.st_ctime_ns
        kept = _kept.get(folder)
        if kept is not None and kept[0] == stamp:
            return kept[1]
        began_ns = time.time_ns()
        with os.scandir(folder) as entries:
            kinds = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
    except OSError:
        _kept.pop(folder, None)
        return _NOTHING
    found = Listing(
        tuple(name for name, is_folder in kinds if not is_folder),
        tuple(name for name, is_folder in kinds if is_folder),
    )
    if began_ns - max(info.st_mtime_ns, info.st_ctime_ns) > _SETTLED_NS:
        _kept[folder] = stamp, found
    return found
