"""Case 51: a host that loads an artifact starts no compiler and measures nothing. On a GPU:
`tests/gpu/host.py` counts, and `tests/client/test_gpu_kernel.py` shows that a tuned build measures nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.daemon import Daemon
from tests.e2e import small_host

TOOLS = ("gcc", "g++", "cc", "c++", "clang", "clang++", "ld", "as", "nvcc", "ptxas", "ptxas-blackwell")


def test_a_host_with_failing_compilers_runs_what_another_compiled(
    shared_daemon: Daemon, tmp_path: Path
) -> None:
    """The program has reductions: two norms with their quantisations."""
    options = {"endpoint": shared_daemon.endpoint, "mode": "remote", "namespace": "clean-host"}
    small_host.run("normed", options, tmp_path / "builder", shared_daemon.env)
    tools, log = tmp_path / "tools", tmp_path / "started"
    tools.mkdir()
    for name in TOOLS:
        (tools / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\nexit 1\n')
        (tools / name).chmod(0o755)
    env = {
        **shared_daemon.env,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "CXX": str(tools / "g++"),
        "CC": str(tools / "gcc"),
        "TRITON_PTXAS_PATH": str(tools / "ptxas"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
    }
    outcome = small_host.run("normed", options, tmp_path / "clean", env)
    assert outcome["worst"] == 0
    assert [(graph["source"], graph["used"]) for graph in outcome["graphs"]] == [("daemon", True)]
    assert not log.exists(), log.read_text()
    assert not list((tmp_path / "clean" / "inductor").rglob("*.so"))
    assert not (tmp_path / "triton").exists()
