"""Graphs that this daemon compiled lately, so that it can be shown what the passes did to them.

No artifact needs its graph: an entry of the store is complete without, and these are gone with the daemon.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import OrderedDict
from pathlib import Path

KEPT_BYTES = 64 << 20  # 400 graphs of the largest size seen (140 kB), 16 of the largest allowed.


class KeptGraphs:
    """Files of finished jobs, by key; the oldest go first. For one event loop, with moves and no copies."""

    def __init__(self, folder: Path, *, limit_bytes: int = KEPT_BYTES) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._total_bytes = 0

    def keep(self, key: bytes, job_folder: Path) -> None:
        """Move graph and request out of a job's folder. A disk that has no room for that keeps none."""
        self._drop(key)
        to = self._folder / key.hex()
        try:
            to.mkdir(mode=0o700, parents=True)
            for name in ("graph", "request"):
                (job_folder / name).rename(to / name)
            size_bytes = (to / "graph").stat().st_size
        except OSError:
            shutil.rmtree(to, ignore_errors=True)
            return
        self._sizes[key] = size_bytes
        self._total_bytes += size_bytes
        while self._total_bytes > self._limit_bytes:
            self._drop(next(iter(self._sizes)))

    def find(self, key: bytes) -> tuple[bytes, bytes] | None:
        """Return graph and request of a key, or None. Blocking: 4 MiB at most."""
        with contextlib.suppress(OSError):
            folder = self._folder / key.hex()
            return (folder / "graph").read_bytes(), (folder / "request").read_bytes()
        return None

    def _drop(self, key: bytes) -> None:
        if key in self._sizes:
            self._total_bytes -= self._sizes.pop(key)
            shutil.rmtree(self._folder / key.hex(), ignore_errors=True)
