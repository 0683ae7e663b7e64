"""The daemon's own share of a miss: CPU seconds of its process while a worker process compiles.

Real compilations of a few seconds each, as the bar is about one of three: a longer one has more signs
of life, and more of what the daemon does anyway. That part is measured by itself, and left in.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from fuse_cache.client.client import Client
from fuse_cache.client.options import CompileOptions
from tests.bench.row import Row, median_row
from tests.daemon import running_daemon
from tests.e2e.small import silu_graph

GRAPHS = 6
IDLE_S = 10.0


def _cpu_ms(pid: int) -> float:
    """Return the CPU time so far of a process's threads that live: the sum of all has steps of 10 ms."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e6


def measure() -> list[Row]:
    """Compile small graphs, one after the other, and take the daemon's CPU time for each."""
    samples, seconds = [], []
    with tempfile.TemporaryDirectory() as name, running_daemon(Path(name) / "daemon") as daemon:
        os.environ["FUSE_CACHE_TRUST_DIR"] = daemon.env["FUSE_CACHE_TRUST_DIR"]
        assert daemon.process is not None
        pid = daemon.process.pid
        options = {"endpoint": daemon.endpoint, "mode": "remote", "cache_dir": str(Path(name) / "cache")}
        client = Client(CompileOptions.from_mapping(options))
        for number in range(GRAPHS + 1):
            want = silu_graph(number + 3).want()
            before, began_s = _cpu_ms(pid), time.monotonic()
            (answer,) = client.obtain([want])
            assert answer.source == "compiled", answer.error
            if number:  # The first one waits for the seed of its target.
                samples.append(_cpu_ms(pid) - before)
                seconds.append(time.monotonic() - began_s)
        client.close()
        before = _cpu_ms(pid)
        time.sleep(IDLE_S)
        idle = (_cpu_ms(pid) - before) / IDLE_S
    shares = [100 * own / (whole * 1e3) for own, whole in zip(samples, seconds, strict=True)]
    return [
        median_row("CPU time of the daemon process on a miss", samples, "ms", 30),
        median_row("the whole request, client to client", [1e3 * whole for whole in seconds], "ms"),
        median_row("of the whole request", shares, "%", 1),
        Row(what="CPU time of the daemon in a second without any call", value=idle, unit="ms"),
    ]
