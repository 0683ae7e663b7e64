"""One inference host with a GPU: compiles or loads models through a daemon, and says what happened.

`python tests/gpu/host.py` reads a JSON list of jobs from stdin, {"model", "kind", "layers", "backend",
"options"}, and prints a JSON line for each. Backend "inductor" is the peer: torch.compile on this host alone.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Final

import torch

from fuse_cache.client import report
from fuse_cache.client.backend import fuse_cache
from fuse_cache.client.loader import warm_up
from tests.models import build_model, example_inputs

SHAPES: Final = {"dynamic": ((2, 8), (3, 5), (1, 16)), "static": ((2, 8),), "static_cache": ((2, 8),)}


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Compile or load one bf16 model on the GPU and compare each call with eager."""
    model = build_model(job["model"], torch.bfloat16, layers=job.get("layers", 2)).cuda()
    kind = job["kind"]
    before = len(report())
    compiles = _count_triton_compiles()
    with torch.no_grad():
        model(**example_inputs(model, kind))  # cuBLAS and cuDNN start at their first call.
        torch.cuda.synchronize()
        began = time.perf_counter()
        # By the function, as where the package is installed its entry point would find it.
        backend = fuse_cache if job["backend"] == "fuse_cache" else job["backend"]
        compiled = torch.compile(model, backend=backend, fullgraph=True, options=job.get("options") or None)
        calls = []
        for seed, (batch, length) in enumerate(SHAPES[kind]):
            mine, theirs = (
                example_inputs(model, kind, batch=batch, length=length, seed=seed) for _ in range(2)
            )
            got = compiled(**mine)
            torch.cuda.synchronize()
            if seed == 0:
                first_s = time.perf_counter() - began
            calls.append(_distance(got.logits, model(**theirs).logits))
            if kind == "static_cache":
                pairs = zip(mine["past_key_values"].layers, theirs["past_key_values"].layers, strict=True)
                calls += [_distance(a.keys, b.keys) for a, b in pairs]
    graphs = report(json=True)[before:]
    return {
        **{name: job[name] for name in ("model", "kind", "backend")},
        "layers": job.get("layers", 2),
        "first_s": round(first_s, 3),
        "worst": max(calls),
        "triton_compiles": compiles[0],
        "sources": [graph["source"] for graph in graphs],
        "seconds": [round(graph["seconds"], 3) for graph in graphs],
        "reasons": [graph["reason"] for graph in graphs if graph.get("reason")],
        "keys": [graph["key"] for graph in graphs],
    }


def _count_triton_compiles() -> list[int]:
    import triton

    count = [0]
    before = triton.compile

    def counted(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return before(*args, **kwargs)

    triton.compile = triton.compiler.compile = triton.compiler.compiler.compile = counted
    return count


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).abs().max()) / max(1.0, float(b.float().abs().max()))


if __name__ == "__main__":
    warm_up()
    for item in json.load(sys.stdin):
        print(json.dumps(run_job(item)), flush=True)
