"""On a machine with a GPU: load contents that were built without one, and hold them against eager PyTorch.

`python tests/gpu/load_contents.py FOLDER` takes every folder below that has `content` and `graph`
(`build_contents.py` writes them, with the arguments of the calls) and prints one line of JSON for each. No
model library is needed: the graph is rebuilt from its bytes and run as it is. Nothing that is tested imports
Triton, so nothing can compile.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fuse_cache.client.loader import load, warm_up
from fuse_cache.proto.graph_codec import decode

TOLERANCE = 4e-2  # of bf16 activations of about 1, relative to the largest


def on_device(values: Sequence[Any]) -> list[Any]:
    """Return the arguments of a call on the GPU: parameters too are plain tensors here."""
    return [value.detach().cuda() if isinstance(value, torch.Tensor) else value for value in values]


def milliseconds(call: Callable[..., object], inputs: Sequence[Any], rounds: int = 30) -> float:
    """Return the median time of one call on the device, in the steady state.

    Inputs that a call writes are put back before each: a cache that fills up would overflow.
    """
    arguments = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
    times = []
    for _ in range(rounds):
        for argument, value in zip(arguments, inputs, strict=True):
            if isinstance(value, torch.Tensor):
                argument.copy_(value)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        call(*arguments)
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return float(sorted(times[5:])[len(times[5:]) // 2])


def check(folder: Path) -> dict[str, Any]:
    """Load one content and return what came of it."""
    graph = decode((folder / "graph").read_bytes())
    content = (folder / "content").read_bytes()
    began = time.perf_counter()
    loaded = load(content, graph=graph)
    load_ms = 1e3 * (time.perf_counter() - began)
    outcome: dict[str, Any] = {"name": folder.name, "bytes": len(content), "load_ms": round(load_ms, 1)}
    outcome["triton_imported"] = "triton" in sys.modules
    runs = []
    calls = [on_device(values) for values in torch.load(folder / "inputs.pt", weights_only=True)]
    first = None
    for inputs in calls:
        ours = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
        torch.cuda.synchronize()
        began = time.perf_counter()
        got = loaded(*ours)
        torch.cuda.synchronize()
        first = first or round(1e3 * (time.perf_counter() - began), 1)
        runs.append((inputs, ours, got))
    outcome["first_call_ms"] = first
    outcome["triton_imported_by_calls"] = "triton" in sys.modules
    outcome["runs"] = [compare(graph, *run) for run in runs]
    outcome["ok"] = all(run["ok"] for run in outcome["runs"])
    outcome["ms"] = round(milliseconds(loaded, calls[0]), 4)
    return outcome


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return how far two results are apart, relative to the largest value; of 8-bit floats, the share that
    differs. Infinity where one is NaN and the other is not.
    """
    if not ours.is_floating_point():
        return float("inf") if (ours != theirs).any() else 0.0
    a, b = ours.float(), theirs.float()
    if not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    if ours.element_size() == 1:
        return float((a != b).float().mean())
    apart = (a - b).nan_to_num(0.0).abs()
    return float(apart.max()) / max(1.0, float(b.nan_to_num(0.0).abs().max())) if apart.numel() else 0.0


def compare(graph: Any, inputs: list[Any], ours: list[Any], got: Sequence[Any]) -> dict[str, Any]:
    """Run the graph itself, eagerly, and compare results and written inputs."""
    from fuse_cache.proto.request import Range
    from fuse_cache.server.worker.rebuild import rebuild

    eager = rebuild(graph, Range()).gm
    theirs = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
    wanted = eager(*theirs)
    pairs = [*zip(got, wanted, strict=True), *zip(ours, theirs, strict=True)]
    worst = max((distance(a, b) for a, b in pairs if isinstance(a, torch.Tensor)), default=0.0)
    eager_ms = round(milliseconds(eager, inputs), 4)
    return {"worst": worst, "ok": worst <= TOLERANCE, "eager_ms": eager_ms}


def main(folder: str) -> int:
    """Check every content; the exit status is 1 when one differs."""
    warm_up()
    failed = 0
    with torch.no_grad():
        for path in sorted(Path(folder).iterdir()):
            if (path / "content").exists():
                outcome = check(path)
                failed += not outcome["ok"]
                print(json.dumps(outcome), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
