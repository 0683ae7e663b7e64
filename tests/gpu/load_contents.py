"""On a machine with a GPU: load contents that were built without one, and hold them against eager PyTorch.

`python tests/gpu/load_contents.py FOLDER` takes every folder below that has `content` and `graph`
(`build_contents.py` writes them) and prints one line of JSON for each. No model library is needed: the graph
is rebuilt from its bytes and run as it is. Nothing that is tested imports Triton, so nothing can compile.
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
from fuse_cache.proto import expression
from fuse_cache.proto.graph import Input, SymMeta, TensorMeta
from fuse_cache.proto.graph_codec import decode
from fuse_cache.proto.spec import ArtifactSpec

SIZES = ((2, 8), (3, 5), (1, 16))  # of the symbols in turn, where there are some
TOLERANCE = 4e-2  # of bf16 activations of about 1, relative to the largest


def make_input(item: Input, values: Sequence[int], generator: torch.Generator) -> Any:
    """Return an input of the form that `item` states, for these values of the symbols."""

    def size(dim: Any) -> int:
        return int(dim) if isinstance(dim, int) else int(expression.evaluate(dim, values))

    if isinstance(item.meta, SymMeta):
        return size(item.meta.value)
    assert isinstance(item.meta, TensorMeta)
    dtype = getattr(torch, item.meta.dtype)
    shape, stride = ([size(dim) for dim in dims] for dims in (item.meta.size, item.meta.stride))
    if dtype.is_floating_point:
        made = torch.randn(shape, generator=generator, device="cuda") * (0.1 if len(shape) > 1 else 1.0)
    elif dtype is torch.bool:
        made = torch.ones(shape, device="cuda")
    else:  # Positions along the last dimension: legal as tokens, as indices and as positions.
        made = torch.arange(shape[-1] if shape else 1, device="cuda").expand(shape or 1).reshape(shape)
    return torch.empty_strided(shape, stride, dtype=dtype, device="cuda").copy_(made)


def milliseconds(call: Callable[[], object], rounds: int = 30) -> float:
    """Return the time of one call on the device, in the steady state."""
    for _ in range(5):
        call()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began.record()
    for _ in range(rounds):
        call()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / rounds


def check(folder: Path) -> dict[str, Any]:
    """Load one content and return what came of it."""
    graph = decode((folder / "graph").read_bytes())
    content = (folder / "content").read_bytes()
    began = time.perf_counter()
    loaded = load(content, graph=graph)
    load_ms = 1e3 * (time.perf_counter() - began)
    outcome: dict[str, Any] = {"name": folder.name, "bytes": len(content), "load_ms": round(load_ms, 1)}
    outcome["triton_imported"] = "triton" in sys.modules
    spec: ArtifactSpec = loaded.spec
    runs = []
    calls = []
    for values in SIZES if spec.symbols else ((),):
        sizes = (*values, *[values[-1]] * len(spec.symbols))[: len(spec.symbols)] if values else ()
        generator = torch.Generator("cuda").manual_seed(0)
        inputs = [make_input(item, sizes, generator) for item in spec.inputs]
        calls.append((sizes, inputs))
    first = None
    for sizes, inputs in calls:
        ours = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
        torch.cuda.synchronize()
        began = time.perf_counter()
        got = loaded(*ours)
        torch.cuda.synchronize()
        first = first or round(1e3 * (time.perf_counter() - began), 1)
        runs.append((sizes, inputs, ours, got))
    outcome["first_call_ms"] = first
    outcome["triton_imported_by_calls"] = "triton" in sys.modules
    outcome["runs"] = [compare(graph, *run) for run in runs]
    outcome["ok"] = all(run["ok"] for run in outcome["runs"])
    _, inputs, _, _ = runs[0]
    outcome["ms"] = round(milliseconds(lambda: loaded(*inputs)), 4)
    return outcome


def compare(graph: Any, sizes: Any, inputs: list[Any], ours: list[Any], got: Sequence[Any]) -> dict[str, Any]:
    """Run the graph itself, eagerly, and compare results and written inputs."""
    from fuse_cache.proto.request import Range
    from fuse_cache.server.worker.rebuild import rebuild

    eager = rebuild(graph, Range()).gm
    theirs = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
    wanted = eager(*theirs)
    pairs = [*zip(got, wanted, strict=True), *zip(ours, theirs, strict=True)]
    worst = 0.0
    for a, b in pairs:
        if isinstance(a, torch.Tensor) and a.is_floating_point():
            scale = max(1.0, float(b.float().abs().max()))
            worst = max(worst, float((a.float() - b.float()).abs().max()) / scale)
        elif isinstance(a, torch.Tensor):
            worst = max(worst, float((a != b).any()))
    eager_ms = round(milliseconds(lambda: eager(*theirs), 5), 4)
    return {"sizes": sizes, "worst": worst, "ok": worst <= TOLERANCE, "eager_ms": eager_ms}


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
