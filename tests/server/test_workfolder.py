"""Folders of dead daemons go, those of living ones stay."""

from __future__ import annotations

import os
from pathlib import Path

from fuse_cache.server.workfolder import WorkFolder


def test_making_a_folder_touches_nothing_and_sweeping_takes_the_dead_only(tmp_path: Path) -> None:
    dead = WorkFolder(tmp_path)
    dead.new_folder("job")
    os.close(dead._lock_fd)  # As the kernel does when its process ends.
    alive = WorkFolder(tmp_path)
    job = alive.new_folder("job")
    swept_by = WorkFolder(tmp_path)
    assert dead.path.exists(), "a start waits for no removal"
    swept_by.sweep()
    assert not dead.path.exists()
    assert job.exists()
    assert sorted(tmp_path.iterdir()) == sorted([alive.path, swept_by.path])
    for folder in (alive, swept_by):
        folder.close()
    assert not list(tmp_path.iterdir())
