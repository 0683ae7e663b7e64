"""A store folder that can never work is wrong usage: exit code 2, and a text that says what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fuse_cache.server.cache.filesystem import StoreFolderError, refuse_unusable
from tests.server.harness import READY_S, FakeDaemon


def refused_start(folder: Path, store: Path) -> str:
    """Start a daemon that must end with exit code 2, and return its log."""
    daemon = FakeDaemon(folder, store=str(store)).start(wait=False)
    assert daemon.process.wait(READY_S) == 2, daemon.log()
    assert "Traceback" not in daemon.log()
    return daemon.log()


def test_a_start_on_a_store_that_cannot_work_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    text = refused_start(tmp_path / "a", tmp_path / "file" / "store")
    assert "is not a directory; give --store another folder" in text
    assert not (tmp_path / "a" / "work").exists(), "nothing was begun"
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "FORMAT").write_text("fuse-cache store 99\n")
    assert "of another format" in refused_start(tmp_path / "b", tmp_path / "old")


@pytest.mark.parametrize("below", [".", "store", "deeper/store"])
def test_a_file_in_the_way_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreFolderError, match=r"file is not a directory; give --store another folder"):
        refuse_unusable(tmp_path / "file" / below)


@pytest.mark.parametrize(
    ("name", "mode", "hint"), [("", 0o000, "may not read"), ("store", 0o500, "may not make folders in")]
)
def test_a_folder_without_permission_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mode: int, hint: str
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=mode)
    if os.getuid() == 0:  # Root may everything: answer as for anybody else.
        monkeypatch.setattr(os, "access", lambda path, needed: not (needed & ~(mode >> 6)))
    with pytest.raises(StoreFolderError, match=hint):
        refuse_unusable(closed / name if name else closed)


def test_folders_that_can_be_used_are_not_refused(tmp_path: Path) -> None:
    refuse_unusable(tmp_path)
    refuse_unusable(tmp_path / "not" / "there" / "yet")
