"""From Dynamo's graph to a callable, in a second host whose process is warm and whose caches are empty."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tests.bench.row import Row, median_row
from tests.daemon import running_daemon
from tests.e2e.host import run_host

LAYERS = 16
HOSTS = 5


def measure() -> list[Row]:
    """Compile two models once; then fresh hosts load the small one, which warms them up, and the large."""
    with tempfile.TemporaryDirectory() as name, running_daemon(Path(name) / "daemon") as daemon:
        options = {"endpoint": daemon.endpoint, "mode": "remote"}
        jobs: list[dict[str, Any]] = [
            {"model": "gpt2", "dtype": "float32", "kind": "static", "options": options},
            {
                "model": "llama",
                "dtype": "float32",
                "kind": "static_cache",
                "layers": LAYERS,
                "options": options,
            },
        ]
        cold = run_host(jobs, Path(name) / "cold", env=daemon.env)
        compile_ms = cold[1]["graphs"][0]["seconds"] * 1e3
        first, warm = [], []
        for number in range(HOSTS):
            small, large = run_host(jobs, Path(name) / f"host-{number}", env=daemon.env)
            assert large["graphs"][0]["source"] == "daemon", large
            first.append(small["graphs"][0]["seconds"] * 1e3)
            warm.append(large["graphs"][0]["seconds"] * 1e3)
    return [
        median_row(f"graph to callable, {LAYERS}-layer Llama, warm process", warm, "ms", 100),
        median_row("graph to callable, first of a process", first, "ms"),
        Row(what=f"compiled by the daemon, {LAYERS} layers", value=compile_ms, unit="ms"),
    ]
