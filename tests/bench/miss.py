"""The daemon's own share of a miss: CPU seconds of its process while a worker process compiles."""

from __future__ import annotations

import tempfile
from pathlib import Path

import psutil

from tests.bench.row import Row, median_row
from tests.daemon import running_daemon
from tests.e2e.host import run_host

MODELS = ("gpt2", "llama", "qwen2", "mistral")


def measure() -> list[Row]:
    """Compile four small models, one after the other, and take the daemon's CPU time for each."""
    samples, shares = [], []
    with tempfile.TemporaryDirectory() as name, running_daemon(Path(name) / "daemon") as daemon:
        assert daemon.process is not None
        process = psutil.Process(daemon.process.pid)
        for model in MODELS:
            before = process.cpu_times()
            job = {
                "model": model, "dtype": "float32", "kind": "static",
                "options": {"endpoint": daemon.endpoint, "mode": "remote"},
            }  # fmt: skip
            (outcome,) = run_host([job], Path(name) / model, env=daemon.env)
            after = process.cpu_times()
            assert outcome["graphs"][0]["source"] == "compiled"
            own = after.user + after.system - before.user - before.system
            samples.append(own * 1e3)
            shares.append(100 * own / outcome["graphs"][0]["seconds"])
    return [
        median_row("CPU time of the daemon process on a miss", samples, "ms", 30),
        median_row("of the whole request", shares, "%", 1),
    ]
