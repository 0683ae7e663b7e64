"""Listings that are kept must never be old ones."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from fuse_cache.proto import folders
from fuse_cache.proto.folders import listing


def test_each_of_many_changes_within_one_tick_of_the_clock_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder's times do not tell them apart, so none of these listings may be kept."""
    stat, tick_ns = os.stat, 4_000_000_000

    def coarse(path: str) -> SimpleNamespace:
        found = stat(path)
        return SimpleNamespace(
            st_dev=found.st_dev,
            st_ino=found.st_ino,
            st_mtime_ns=found.st_mtime_ns // tick_ns * tick_ns,
            st_ctime_ns=found.st_ctime_ns // tick_ns * tick_ns,
        )

    for number in range(20):
        (tmp_path / f"{number:02}").touch()
        with monkeypatch.context() as patched:
            patched.setattr(os, "stat", coarse)
            names = listing(str(tmp_path)).files
        assert len(names) == number + 1


def test_a_folder_that_nobody_touches_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_SETTLED_NS", 0)
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.py").touch()
    (tmp_path / "link").symlink_to(tmp_path / "inner")
    first = listing(str(tmp_path))
    assert first == (("a.py", "link"), ("inner",))
    with monkeypatch.context() as patched:
        patched.delattr(os, "scandir")
        assert listing(str(tmp_path)) is first
    before = tmp_path.stat()
    (tmp_path / "b.py").touch()
    os.utime(tmp_path, ns=(before.st_atime_ns, before.st_mtime_ns))  # As an installer may set it.
    assert listing(str(tmp_path)).files == ("a.py", "b.py", "link")


def test_another_folder_of_the_same_name_is_listed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_SETTLED_NS", 0)
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / f"{version}.py").touch()
    current = tmp_path / "current"
    current.symlink_to("1")
    assert listing(str(current)).files == ("1.py",)
    current.unlink()
    current.symlink_to("2")
    assert listing(str(current)).files == ("2.py",)


def test_what_is_no_folder_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert listing(str(tmp_path / "file")) == ((), ())
    assert listing(str(tmp_path / "none")) == ((), ())
