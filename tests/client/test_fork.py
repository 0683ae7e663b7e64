"""Case 59: a process that has used the client forks workers that use it too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.fakes import FakeDaemon

PARENT = """
import multiprocessing, sys, time
import torch
sys.path.insert(0, sys.argv[2])
import pytest

from fuse_cache.client.options import CompileOptions
from fuse_cache.client.client import shared_client
from tests.fakes import make_want

pytestmark = pytest.mark.apart

options = CompileOptions.from_mapping({"endpoint": sys.argv[1], "mode": "auto"})

def ask(number):
    began = time.monotonic()
    (answer,) = shared_client(options).obtain([make_want(b"worker %d" % number)])
    return answer.source, str(answer.error), time.monotonic() - began

assert ask(0)[0] == "compiled", ask(0)
with multiprocessing.get_context("fork").Pool(4) as pool:
    for source, error, seconds in pool.map(ask, range(1, 5), chunksize=1):
        assert source == "compiled", error
        assert seconds < 5, seconds
assert ask(5)[0] == "compiled"
print("all answered")
"""


def test_forked_workers_look_up_after_their_parent_did(daemon: FakeDaemon, endpoint: str) -> None:
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PARENT, endpoint, root],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "all answered", done.stderr
    assert daemon.calls["Compile"] == 6
