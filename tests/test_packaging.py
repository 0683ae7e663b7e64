"""The generic folder names stay inside fuse_cache, and what is built from the tree is whole."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("client", "kernels", "passes", "proto", "server")


def _tracked(folder: str) -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return {
        f"fuse_cache/{line}" for line in listed.split() if line.endswith((".py", ".pyi", ".typed", ".j2"))
    }


def test_no_folder_of_ours_is_importable_under_its_bare_name(tmp_path: Path) -> None:
    probe = f"import importlib.util as u; print([n for n in {FOLDERS!r} if u.find_spec(n)])"
    found = subprocess.run(
        [sys.executable, "-P", "-c", probe], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


def test_the_backend_is_registered_as_an_entry_point() -> None:
    names = {point.name: point.value for point in entry_points(group="torch_dynamo_backends")}
    assert names["fuse_cache"] == "fuse_cache.client.backend:fuse_cache"


@pytest.mark.slow
def test_the_wheel_and_the_wheel_from_the_sdist_hold_every_tracked_file(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    hatch = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path / "dist")]
    subprocess.run(hatch, cwd=clone, check=True, capture_output=True)
    sdist = next((tmp_path / "dist").glob("*.tar.gz"))
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    unpacked = next((tmp_path / "unpacked").iterdir())
    subprocess.run(
        [*hatch[:-1], str(tmp_path / "again"), "-t", "wheel"], cwd=unpacked, check=True, capture_output=True
    )
    expected = set().union(*(_tracked(folder) for folder in FOLDERS))
    for folder in ("dist", "again"):
        wheel = next((tmp_path / folder).glob("*.whl"))
        names = set(zipfile.ZipFile(wheel).namelist())
        assert expected <= names, sorted(expected - names)
        assert not any(name.startswith("tests/") for name in names)
