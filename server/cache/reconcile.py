"""Makes index and files agree again: files are the truth."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from fuse_cache.server.cache.entry_file import DamagedFileError
from fuse_cache.server.cache.folder import Folder
from fuse_cache.server.cache.index import Index
from fuse_cache.server.cache.tier import Space, Stored

# A publish writes content, then manifest; minutes may lie between them on a sick disk, never an hour.
UNNAMED_AGE_S = 3_600.0
DANGLING_AGE_S = 60.0
SHARDS = [f"{number:02x}" for number in range(256)]


@dataclass(slots=True)
class Reconciled:
    """What had to be put right."""

    adopted: int = 0  # files without a row, or with one that is wrong
    forgotten: int = 0  # rows without a file
    set_aside: int = 0  # files that do not say what they are
    unnamed: int = 0  # contents that no manifest names
    dangling: int = 0  # manifests whose content is gone
    temps: int = 0  # files of writers that died


def reconcile(
    folder: Folder,
    index: Index,
    *,
    now_s: float,
    pause: Callable[[], None],
) -> Reconciled:
    """Walk all files, mend the index, sweep what is nobody's. Others may read and write meanwhile.

    `pause` is called after each of up to 512 shards. 100,000 artifacts take seconds: for a background thread.

    Raises: OSError, and the errors of `Index`.
    """
    done = Reconciled()
    for space in (Space.CONTENT, Space.MANIFEST):
        present = set(folder.shards(space))
        for shard in SHARDS:
            if _reconcile_shard(folder, index, space, shard, present, done):
                pause()
    for name in index.unnamed(before_s=now_s - UNNAMED_AGE_S):
        folder.remove(Space.CONTENT, name)
        index.delete([(Space.CONTENT, name)])
        done.unnamed += 1
    for name in index.dangling(before_s=now_s - DANGLING_AGE_S):
        folder.remove(Space.MANIFEST, name)
        index.delete([(Space.MANIFEST, name)])
        done.dangling += 1
    for path in folder.dead_temps(now_s=now_s):
        with contextlib.suppress(OSError):
            folder.files.unlink(path)
            done.temps += 1
    index.sweep()
    return done


def _reconcile_shard(
    folder: Folder, index: Index, space: Space, shard: str, present: set[str], done: Reconciled
) -> bool:
    """Mend one shard; tell whether there was anything in it."""
    rows = index.shard(space, shard)
    names = set(folder.names(space, shard)) if shard in present else set()
    found: list[tuple[Space, Stored, float]] = []
    for name in names:
        row = rows.get(name)
        if row is not None and row.consistent and row.size_bytes == folder.size(space, name):
            continue
        try:
            header = folder.header(space, name)
            if header is not None:
                written_s = folder.files.stat(folder.path(space, name)).st_mtime
                found.append((space, Stored(name, header.file_bytes, header.meta), written_s))
        except DamagedFileError:
            folder.set_aside(space, name)
            done.set_aside += 1
        except FileNotFoundError:
            continue  # Deleted meanwhile.
    if found:
        index.adopt(found)
        done.adopted += len(found)
    # Asked again by name: a listing can lag behind, and a writer may have put it since.
    lost = [(space, name) for name in rows.keys() - names if folder.size(space, name) is None]
    if lost:
        index.delete(lost)
        done.forgotten += len(lost)
    return bool(rows or names)
