"""`fuse-cache warm`: a model without weights fills the cache, and a host with weights finds all of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import COMMAND, Daemon

MODULE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(32, 64, bias=False), nn.RMSNorm(32)
        nn.init.ones_(self.up.weight)

    def forward(self, x):
        return nn.functional.silu(self.up(self.norm(x)))

def block():
    return Block()
"""
HOST = """
import json, sys
import torch
from fuse_cache.client import report
from its_block import block

model = block().eval()
compiled = torch.compile(model, backend="fuse_cache", options=json.loads(sys.argv[1]))
x = torch.randn(6, 32)
torch._dynamo.mark_dynamic(x, 0)
with torch.no_grad():
    worst = float((compiled(x) - model(x)).abs().max())
print(json.dumps({"sources": [graph.source for graph in report()], "worst": worst}))
"""
MANIFEST = """
[[model]]
name = "block"
factory = "its_block:block"
inputs = [{name = "x", shape = ["tokens", 32], dtype = "float32"}]
ranges = [[1, 8], [9, 64]]
"""


@pytest.mark.slow
def test_a_cache_is_filled_without_weights_and_a_host_with_weights_compiles_nothing(
    tmp_path: Path, shared_daemon: Daemon
) -> None:
    (tmp_path / "its_block.py").write_text(MODULE)
    (tmp_path / "host.py").write_text(HOST)
    manifest = tmp_path / "warm.toml"
    manifest.write_text(MANIFEST)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "FUSE_CACHE_NAMESPACE": "warmed"}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=300, check=False
        )

    def warm(*options: str) -> tuple[int, dict[str, Any]]:
        words = "warm", str(manifest), "--endpoint", shared_daemon.endpoint, "--json", *options
        done = run(*COMMAND, *words)
        assert done.stdout, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return done.returncode, answer

    targets = shared_daemon.stats()["targets"]
    artifacts = 2 * len(targets)
    code, found = warm("--dry-run")
    assert (code, found["missing"], found["compiled"]) == (1, artifacts, 0)
    before = shared_daemon.stats()["compiles"]
    code, found = warm()
    assert (code, found["compiled"], found["failed"]) == (0, artifacts, 0)
    assert {item["target"] for item in found["artifacts"]} == set(targets)
    assert shared_daemon.stats()["compiles"] == before + artifacts
    code, again = warm()
    assert (code, again["stored"], again["compiled"]) == (0, artifacts, 0)
    assert {item["key"] for item in again["artifacts"]} == {item["key"] for item in found["artifacts"]}

    options = {"endpoint": shared_daemon.endpoint, "mode": "remote", "compile_ranges": [[1, 8], [9, 64]]}
    done = run(sys.executable, str(tmp_path / "host.py"), json.dumps(options))
    assert done.returncode == 0, done.stderr
    host = json.loads(done.stdout.splitlines()[-1])
    assert host["sources"] == ["daemon", "daemon"]
    assert host["worst"] < 1e-4
    assert shared_daemon.stats()["compiles"] == before + artifacts
    assert {entry["model"] for entry in shared_daemon.entries() if entry["namespace"] == "warmed"} == {
        "block"
    }


def test_what_cannot_be_warmed_is_named_and_the_rest_goes_on(tmp_path: Path, shared_daemon: Daemon) -> None:
    manifest = tmp_path / "warm.toml"
    manifest.write_text(MANIFEST.replace("its_block:block", "its_nowhere:block"))
    command = [*COMMAND, "warm", str(manifest), "--endpoint", shared_daemon.endpoint]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "block: failed: factory its_nowhere:block: No module named 'its_nowhere'" in done.stdout
    assert "block: tracing on cpu" in done.stderr

    manifest.write_text(MANIFEST + 'targets = ["sm_75"]\n')
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert "model block: the daemon does not build for sm_75, but for cpu-" in done.stderr


def test_a_daemon_that_is_not_there_is_told_before_anything_is_traced(tmp_path: Path) -> None:
    manifest = tmp_path / "warm.toml"
    manifest.write_text(MANIFEST)
    command = [*COMMAND, "warm", str(manifest), "--endpoint", f"unix:{tmp_path}/none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "the connection was refused" in done.stderr
    assert "tracing" not in done.stderr
