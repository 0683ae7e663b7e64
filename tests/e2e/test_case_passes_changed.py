"""Case 2: fusion off, on, with one line of the replacement edited, and with the passes in another order; one
store for all daemons, one cache folder for all hosts. Four keys, and nobody is given another's artifact.

Each daemon and each host is a process whose sources are a tree of their own, as after an upgrade.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fuse_cache.passes.fingerprint import installed_root
from tests.daemon import Daemon
from tests.e2e import small_host


def edited(package: Path) -> None:
    """Let fused operators quantise the negative of the norm: whoever runs one sees it in the codes."""
    replace_once(package / "kernels/fused_quant/op.py", "reference(value, *", "reference(-value, *")


def reordered(package: Path) -> None:
    """Move the elimination of no-ops behind the fusions."""
    for path, moved, place in (
        ("proto/pass_tables.py", 'PassFacts(name="eliminate_noops"', 'PassFacts(name="split_tidy"'),
        ("passes/order.py", '"eliminate_noops": Place', '"split_tidy": Place'),
    ):
        source = (package / path).read_text()
        (line,) = (line for line in source.splitlines(keepends=True) if line.strip().startswith(moved))
        replace_once(package / path, line, "")
        replace_once(package / path, "    " + place, line + "    " + place)


def replace_once(file: Path, old: str, new: str) -> None:
    source = file.read_text()
    assert source.count(old) == 1, (file, old)
    file.write_text(source.replace(old, new))


@contextmanager
def daemon_of(change: Callable[[Path], None], folder: Path, beside: Daemon) -> Iterator[Daemon]:
    """Run the daemon of a changed tree on the store of another daemon."""
    root = folder / "tree"
    for part in ("passes", "kernels", "proto", "server", "client"):
        ignore = shutil.ignore_patterns("__pycache__", "*.pyi")
        shutil.copytree(installed_root() / part, root / "fuse_cache" / part, ignore=ignore)
    change(root / "fuse_cache")
    paths = filter(None, (str(root), os.environ.get("PYTHONPATH")))
    daemon = Daemon(folder, "--workers", "1", env={**beside.env, "PYTHONPATH": os.pathsep.join(paths)})
    daemon.store = beside.store
    try:
        yield daemon.start()
    finally:
        daemon.stop()


def host(daemon: Daemon, folder: Path, cache: Path, *, fuse: bool = True) -> dict[str, Any]:
    """Run a host of the daemon's tree, and return what it was given."""
    options = {
        "endpoint": daemon.endpoint, "mode": "remote", "pass_config": {"fuse_norm_quant": fuse},
        "cache_dir": str(cache), "namespace": "passes", "lookup_timeout_s": 5.0,
    }  # fmt: skip
    outcome = small_host.run("normed", options, folder, daemon.env)
    (graph,) = outcome["graphs"]
    fused = graph["fusions"].get("norm_quant", 0)
    return {"key": graph["key"], "source": graph["source"], "fused": fused, "negated": outcome["worst"] > 1.0}


@pytest.mark.slow
def test_off_on_edited_and_reordered_passes_have_keys_of_their_own_and_never_each_others_artifact(
    shared_daemon: Daemon, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    first = {
        "off": host(shared_daemon, tmp_path / "off", cache, fuse=False),
        "on": host(shared_daemon, tmp_path / "on", cache),
    }
    for change in (edited, reordered):
        with daemon_of(change, tmp_path / change.__name__, shared_daemon) as daemon:
            first[change.__name__] = host(daemon, tmp_path / "changed", cache)
    assert {row["source"] for row in first.values()} == {"compiled"}
    assert len({row["key"] for row in first.values()}) == 4
    stored = {entry["key"] for entry in shared_daemon.entries() if entry["namespace"] == "passes"}
    assert stored == {row["key"] for row in first.values()}
    for name, row in first.items():
        assert (row["fused"] > 0, row["negated"]) == (name != "off", name == "edited"), (name, row)

    # With the others' artifacts in the store, and nothing of their own.
    for name, fuse in (("off", False), ("on", True)):
        again = host(shared_daemon, tmp_path / "again", tmp_path / f"cache of {name}", fuse=fuse)
        assert again == {**first[name], "source": "daemon"}
