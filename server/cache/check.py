"""Looks at every file of a store and says what is wrong; with `fix`, puts it right.

What `fuse-cache check [--fix]` runs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from fuse_cache.server.cache.disk import DiskTier
from fuse_cache.server.cache.index import Index
from fuse_cache.server.cache.reconcile import UNNAMED_AGE_S
from fuse_cache.server.cache.tier import CorruptEntryError, Entry, Space, TierError
from fuse_cache.server.cache.verified import Check


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    kind: "damaged" (file is not what it should be), "dangling" (manifest without its content), "unnamed"
    (content that no manifest names), "stranger" (file that is no entry), "temp" (left by a writer that died),
    "unindexed" (file without a row), "lost" (row without a file), "size" (row and file disagree).
    """

    kind: str
    what: str
    detail: str
    fixed: bool


def check(
    tier: DiskTier, checks: Mapping[Space, Check], *, fix: bool, now_s: float | None = None
) -> list[Problem]:
    """Read and verify everything, while others read and write. Reads all bytes: minutes for a large store.

    Damaged files go to quarantine/, dangling manifests and old unnamed contents are deleted, strangers are
    only named.

    Raises:
        TierError: the folder cannot be used, or (with `fix`) not be written.
        OSError: a file could not be read.
    """
    now_s = time.time() if now_s is None else now_s
    problems: list[Problem] = []
    # Contents first: a manifest dangles when its content is damaged too.
    sound = {digest for digest, _ in _whole(tier, Space.CONTENT, checks, problems, fix=fix)}
    damaged = {problem.what for problem in problems}
    named: set[bytes] = set()
    for key, entry in _whole(tier, Space.MANIFEST, checks, problems, fix=fix):
        content = entry.meta.content
        named.add(content)
        # Asked of the tier, not of `sound`: it may have been published since.
        if _label(Space.CONTENT, content) in damaged or not tier.contains(Space.CONTENT, content):
            fixed = fix and tier.delete(Space.MANIFEST, key)
            detail = f"content {content.hex()[:12]} is gone"
            problems.append(Problem("dangling", _label(Space.MANIFEST, key), detail, fixed))
    for digest in sorted(sound - named):
        # A younger one may be half of a publish that is under way.
        if now_s - _written_s(tier, digest, now_s) > UNNAMED_AGE_S:
            fixed = fix and tier.delete(Space.CONTENT, digest)
            problems.append(Problem("unnamed", _label(Space.CONTENT, digest), "no manifest names it", fixed))
    problems += _strangers(tier)
    problems += _temps(tier, fix=fix, now_s=now_s)
    if tier.folder.writable:
        problems += _index(tier, fix=fix)
        if fix:
            tier.guarded.reconcile()
    return problems


def _whole(
    tier: DiskTier, space: Space, checks: Mapping[Space, Check], problems: list[Problem], *, fix: bool
) -> Iterator[tuple[bytes, Entry]]:
    """Yield the entries that are as they should be; note the others."""
    for shard in tier.folder.shards(space):
        for name in tier.folder.names(space, shard):
            try:
                entry = tier.get(space, name)
                reason = checks[space](name, entry) if entry is not None else None
            except CorruptEntryError as error:
                entry, reason = None, error.reason
            if reason is not None:
                fixed = fix and tier.quarantine(space, name)
                problems.append(Problem("damaged", _label(space, name), reason, fixed))
            elif entry is not None:
                yield name, entry


def _strangers(tier: DiskTier) -> Iterator[Problem]:
    folder = tier.folder
    for space in Space:
        for shard in folder.shards(space):
            ours = {name.hex() for name in folder.names(space, shard)}
            with contextlib.suppress(OSError):
                for text in folder.files.list(folder.shard_path(space, shard)):
                    if text not in ours:
                        yield Problem(
                            "stranger", f"{space.name.lower()}/{shard}/{text}", "not an entry's name", False
                        )


def _temps(tier: DiskTier, *, fix: bool, now_s: float) -> Iterator[Problem]:
    for path in tier.folder.dead_temps(now_s=now_s):
        fixed = False
        if fix:
            with contextlib.suppress(OSError):
                tier.folder.files.unlink(path)
                fixed = True
        yield Problem("temp", path, "its writer is gone", fixed)


def _index(tier: DiskTier, *, fix: bool) -> Iterator[Problem]:
    """Compare rows with files.

    `reconcile` mends what is found here; a row of another size is written anew.
    """
    for space in Space:
        try:
            rows = {stored.name: stored.size_bytes for stored in tier.rows(space)}
        except TierError as error:
            yield Problem("index", "cache.db", error.reason, fix)
            return
        for shard in tier.folder.shards(space):
            for name in tier.folder.names(space, shard):
                size_bytes = tier.folder.size(space, name)
                row_bytes = rows.pop(name, None)
                if size_bytes is None:
                    continue  # Deleted meanwhile.
                what = _label(space, name)
                if row_bytes is None:
                    yield Problem("unindexed", what, "the index does not know the file", fix)
                elif row_bytes != size_bytes:
                    if fix:
                        tier.guarded.run(partial(Index.delete, rows=[(space, name)]))
                    yield Problem(
                        "size", what, f"{row_bytes} bytes in the index, {size_bytes} in the file", fix
                    )
        for name in rows:
            if tier.folder.size(space, name) is None:
                yield Problem("lost", _label(space, name), "the file is gone", fix)


def _label(space: Space, name: bytes) -> str:
    return f"{space.name.lower()} {name.hex()}"


def _written_s(tier: DiskTier, digest: bytes, now_s: float) -> float:
    try:
        return tier.folder.files.stat(tier.folder.path(Space.CONTENT, digest)).st_mtime
    except OSError:
        return now_s
