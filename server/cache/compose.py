"""How the daemon's store is put together: the one place that knows all tiers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from fuse_cache.server.cache.bounded import BoundedTier
from fuse_cache.server.cache.check import check
from fuse_cache.server.cache.disk import DiskTier
from fuse_cache.server.cache.memory import MemoryTier
from fuse_cache.server.cache.store import Store, compose
from fuse_cache.server.cache.tier import Entry, Space
from fuse_cache.server.cache.verified import VerifiedTier, check_content
from fuse_cache.server.cache.verified import check_manifest as check_form

DEFAULT_MEMORY_BYTES = 256 * 1024 * 1024  # Four of the largest artifacts, or thousands of ordinary ones.
DEFAULT_DISK_BYTES = 16 * 1024 * 1024 * 1024  # 200,000 artifacts of 85 kB, the size of a 2-layer GPU piece.


def open_store(
    folder: Path,
    *,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    disk_bytes: int = DEFAULT_DISK_BYTES,
    check_manifest: Callable[[bytes, bytes], str | None] | None = None,
) -> Store:
    """Open the store over `folder`: memory above disk. Call `Store.start()` once the server listens.

    `check_manifest(key, signed_manifest)` is asked about each manifest that is read from disk, and answers
    why it must not be served (signature, trust) or None. A folder that cannot be used now leaves the memory
    tier alone at work, and says DEGRADED.

    Raises:
        StoreFolderError: the folder never can be a store: on a network file system, of another format,
        without renames.
    """

    def check_whole(key: bytes, entry: Entry) -> str | None:
        reason = check_form(key, entry)
        if reason is None and check_manifest is not None:
            reason = check_manifest(key, entry.data)
        return reason

    checks = {Space.MANIFEST: check_whole, Space.CONTENT: check_content}
    disk = DiskTier(folder, limit_bytes=disk_bytes)
    bounded = BoundedTier(VerifiedTier(disk, checks))
    return compose(MemoryTier(limit_bytes=memory_bytes), bounded, checker=partial(check, disk, checks))
