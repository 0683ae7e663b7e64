"""What one call of a loaded artifact costs over Inductor's own callable for the same graph."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.bench.row import Row, median_row
from tests.daemon import running_daemon
from tests.models import build_model, example_inputs

ROUNDS = 300


def _compiled(backend: str, options: dict[str, Any], captured: Any) -> Callable[..., Any]:
    """Return what the backend made of a captured graph, called with the graph's own arguments."""
    from torch._dynamo.backends.registry import lookup_backend

    made: list[Callable[..., Any]] = []

    def keep(gm: Any, inputs: Any) -> Any:
        call = lookup_backend(backend)(gm, inputs, **({"options": options} if options else {}))
        made.append(call)
        return call

    captured(keep)
    return made[0]


def _keeping(arguments: list[Any]) -> Callable[..., Any]:
    """Return a backend that runs graphs eagerly and leaves the arguments of the last call in `arguments`."""

    def backend(gm: Any, inputs: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            arguments[:] = args
            return gm(*args)

        return call

    return backend


def measure() -> list[Row]:
    """Call both in turn with the same arguments: many inputs (a Llama's parameters) and few (an MLP)."""
    rows = []
    with tempfile.TemporaryDirectory() as name, running_daemon(Path(name) / "daemon") as daemon:
        os.environ["FUSE_CACHE_TRUST_DIR"] = daemon.env["FUSE_CACHE_TRUST_DIR"]
        options = {
            "endpoint": daemon.endpoint, "mode": "remote", "cache_dir": str(Path(name) / "cache"),
            "range_dim": "x:0", "compile_ranges": [[1, 64], [65, 128]],
        }  # fmt: skip
        torch.manual_seed(0)
        layer = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.SiLU(), torch.nn.Linear(16, 16)).eval()

        def mlp(x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = layer(x)
            return out

        def run_mlp(backend: Callable[..., Any]) -> None:
            x = torch.randn(4, 16)
            torch._dynamo.mark_dynamic(x, 0, min=1, max=128)
            torch.compile(mlp, backend=backend, fullgraph=True)(x)

        model = build_model("llama")

        def run_llama(backend: Callable[..., Any]) -> None:
            torch.compile(model, backend=backend, fullgraph=True)(**example_inputs(model, "static"))

        for label, run, chosen in (
            ("MLP, two ranges", run_mlp, options),
            ("2-layer Llama", run_llama, {k: v for k, v in options.items() if "range" not in k}),
        ):
            with torch.no_grad():
                arguments: list[Any] = []

                torch._dynamo.reset()
                run(_keeping(arguments))
                torch._dynamo.reset()
                ours = _compiled("fuse_cache", chosen, run)
                torch._dynamo.reset()
                theirs = _compiled("inductor", {}, run)
                samples = []
                for round_ in range(ROUNDS + 20):
                    timed = []
                    for call in (ours, theirs) if round_ % 2 else (theirs, ours):
                        began = time.perf_counter()
                        call(*arguments)
                        timed.append((time.perf_counter() - began) * 1e6)
                    if round_ >= 20:
                        mine, other = timed if round_ % 2 else timed[::-1]
                        samples.append(mine - other)
            rows.append(median_row(f"a call over Inductor's own, {label}", samples, "us", 10))
    return rows
