"""The C++ compiler is part of the epoch and of every key; where it lies is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fuse_cache.server.cxx import NONE, cxx_identity, find_cxx
from fuse_cache.server.epoch import package_root, take_epoch, take_stamps
from fuse_cache.server.interpreter import own_interpreter as own


def compiler(path: Path, version: str) -> Path:
    """Make a program that describes itself as gcc does."""
    lines = (
        f"Using built-in specs. COLLECT_GCC={path}", "Target: x86_64-linux-gnu",
        f"Configured with: ../src/configure --prefix={path.parent} version unknown",
        f"gcc version {version} (test)",
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + "".join(f"echo '{line}' >&2\n" for line in lines))
    path.chmod(0o755)
    return path


def test_the_compiler_is_found_as_inductor_finds_it_and_described_without_a_path(tmp_path: Path) -> None:
    default = compiler(tmp_path / "bin" / "g++", "12.2.0")
    other = compiler(tmp_path / "other" / "my-g++", "13.1.0")
    path = {"PATH": str(default.parent)}
    assert cxx_identity(find_cxx(path)) == "gcc version 12.2.0 (test), x86_64-linux-gnu"
    assert (
        cxx_identity(find_cxx({**path, "CXX": str(other)})) == "gcc version 13.1.0 (test), x86_64-linux-gnu"
    )
    assert cxx_identity(find_cxx({**path, "CXX": "no-such-compiler"})) == NONE
    assert cxx_identity(find_cxx({"PATH": str(tmp_path)})) == NONE


def test_another_version_under_the_same_name_is_noticed(tmp_path: Path) -> None:
    old, new = compiler(tmp_path / "g++-12", "12.2.0"), compiler(tmp_path / "g++-13", "13.1.0")
    link = tmp_path / "g++"
    link.symlink_to(old)
    before = find_cxx({"PATH": str(tmp_path)})
    assert find_cxx({"PATH": str(tmp_path)}) == before
    link.unlink()
    link.symlink_to(new)
    assert find_cxx({"PATH": str(tmp_path)}) != before


def test_an_upgraded_compiler_makes_another_epoch_and_key_which_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, memo = package_root(), tmp_path / "memo.json"
    monkeypatch.setitem(os.environ, "CXX", str(compiler(tmp_path / "g++", "12.2.0")))

    def taken() -> tuple[str, bytes, dict[str, str]]:
        epoch = take_epoch(take_stamps(own(root)), own(root), op_modules=(), memo=memo)
        key = epoch.key_fields(request_digest=bytes(32), namespace="", target="cpu-avx2", passes=())
        return epoch.name, key.digest(), dict(key.describe())

    before = taken()
    assert taken() == before, "and from what is remembered"
    compiler(tmp_path / "g++", "12.2.10")
    after = taken()
    assert after[0] != before[0]
    assert after[1] != before[1]
    assert (before[2]["cxx"], after[2]["cxx"]) == (
        "gcc version 12.2.0 (test), x86_64-linux-gnu",
        "gcc version 12.2.10 (test), x86_64-linux-gnu",
    )
    assert str(tmp_path) not in str(after)
