"""Cases 6 and 21: an operator that was corrected never gets the code that was compiled for its old self."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import Daemon, running_daemon

# Each version of the library registers both operators; the second corrects what the first got wrong: `wr`
# says that it writes its argument, `h` says of what dtype, shape and strides its result is.
OPERATORS = """
import torch
from torch import Tensor

VERSION = {version}

@torch.library.custom_op("e2e::wr", mutates_args=("out",) if VERSION > 1 else ())
def wr(x: Tensor, out: Tensor) -> None:
    out.copy_(x * 2)

@torch.library.custom_op("e2e::h", mutates_args=())
def h(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16)

@h.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.bfloat16 if VERSION > 1 else torch.float32)

@wr.register_fake
def _(x: Tensor, out: Tensor) -> None:
    return None
"""

HOST = """
import json, sys
import torch
import e2e_operators
from fuse_cache.client import report

def write(x):
    out = torch.zeros_like(x)
    torch.ops.e2e.wr(x, out)
    return out + 0

def double(x):
    return torch.ops.e2e.h(x) * 2

options = json.load(sys.stdin)
results = {}
for function, size in ((write, 3), (double, 4)):
    torch._dynamo.reset()
    before = len(report())
    with torch.no_grad():
        got = torch.compile(function, backend="fuse_cache", fullgraph=True, options=options)(torch.ones(size))
    row = report(json=True)[before]
    results[function.__name__] = {
        "value": got.float().tolist(), "dtype": str(got.dtype), "source": row["source"], "key": row["key"],
        "reason": row["reason"],
    }
print(json.dumps(results))
"""


def _library(folder: Path, version: int) -> dict[str, str]:
    """Write one version of the operators' library, and return the environment that finds it."""
    place = folder / f"library-{version}"
    place.mkdir(exist_ok=True)
    (place / "e2e_operators.py").write_text(OPERATORS.format(version=version))
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(place), os.environ.get("PYTHONPATH"))))}


def _host(daemon: Daemon, folder: Path, version: int, name: str) -> dict[str, dict[str, Any]]:
    home = folder / name
    home.mkdir()
    options = {
        "endpoint": daemon.endpoint, "cache_dir": str(home / "cache"), "max_queue_s": 60,
        "lookup_timeout_s": 5,
    }  # fmt: skip
    env = {
        **os.environ, **daemon.env, **_library(folder, version), "HOME": str(home),
        "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HOST], input=json.dumps(options), capture_output=True,
        text=True, env=env, cwd=home, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _daemon_env(folder: Path, trust_dir: Path, version: int) -> dict[str, str]:
    return {
        "FUSE_CACHE_TRUST_DIR": str(trust_dir), "FUSE_CACHE_OP_MODULES": "e2e_operators",
        **_library(folder, version),
    }  # fmt: skip


def _check_second(found: dict[str, dict[str, Any]]) -> None:
    assert found["write"]["value"] == [2.0, 2.0, 2.0]
    assert found["double"]["value"] == [2.0, 2.0, 2.0, 2.0]
    assert found["double"]["dtype"] == "torch.bfloat16"


@pytest.mark.slow
def test_a_corrected_operator_gets_no_old_code_whatever_the_daemon_has(
    tmp_path: Path, trust_dir: Path
) -> None:
    with running_daemon(
        tmp_path / "daemon", "--workers", "2", env=_daemon_env(tmp_path, trust_dir, 1)
    ) as daemon:
        old = _host(daemon, tmp_path, 1, "old")
        assert [row["source"] for row in old.values()] == ["compiled"] * 2, old
        new = _host(daemon, tmp_path, 2, "new")
    _check_second(new)
    for name, row in new.items():
        # This daemon has the old library: it refuses, by name, and the host compiles for itself.
        assert row["source"] == "local", row
        assert f"e2e::{'wr' if name == 'write' else 'h'}" in row["reason"], row


@pytest.mark.slow
def test_two_versions_of_an_operator_have_two_entries_in_one_store(tmp_path: Path, trust_dir: Path) -> None:
    found = []
    for version in (1, 2):
        env = _daemon_env(tmp_path, trust_dir, version)
        with running_daemon(tmp_path / "daemon", "--workers", "2", env=env) as daemon:
            found.append(_host(daemon, tmp_path, version, f"host-{version}"))
            entries = daemon.entries()
    old, new = found
    for name in old:
        assert (old[name]["source"], new[name]["source"]) == ("compiled", "compiled")
        assert old[name]["key"] != new[name]["key"]
    _check_second(new)
    assert len(entries) == 4
