"""One inference host as a process: it compiles or loads what it is told, and says what happened.

`python tests/e2e/host.py` reads a JSON list of jobs from stdin and writes a JSON list of outcomes as its
last line.
A job: {"model", "dtype", "kind", "options", "shapes": [[batch, length], ...]}.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# A bf16 model's logits after two layers; 0.0625 is one bf16 step at 8, far above the largest logit seen (1).
TOLERANCE = {"float32": 1e-4, "bfloat16": 6.25e-2}


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Compile or load one model, call it with every shape, and compare each call with eager."""
    import torch

    from fuse_cache.client import report
    from tests.models import build_model, example_inputs

    torch._dynamo.reset()
    dtype = getattr(torch, job.get("dtype", "float32"))
    model = build_model(job["model"], dtype, layers=job.get("layers", 2))
    before = len(report())
    started = time.perf_counter()
    compiled = torch.compile(model, backend="fuse_cache", fullgraph=True, options=job.get("options", {}))
    worst = 0.0
    with torch.no_grad():
        for i, (batch, length) in enumerate(job.get("shapes", [[2, 8]])):
            mine = example_inputs(model, job["kind"], batch=batch, length=length, seed=i)
            theirs = example_inputs(model, job["kind"], batch=batch, length=length, seed=i)
            got, want = compiled(**mine), model(**theirs)
            worst = max(worst, float((got.logits.float() - want.logits.float()).abs().max()))
            if job["kind"] == "static_cache":
                for a, b in zip(
                    mine["past_key_values"].layers, theirs["past_key_values"].layers, strict=True
                ):
                    worst = max(worst, float((a.keys.float() - b.keys.float()).abs().max()))
    graphs = report(json=True)[before:]
    return {"job": job, "seconds": time.perf_counter() - started, "worst": worst, "graphs": graphs}


def run_host(
    jobs: Sequence[dict[str, Any]],
    folder: Path,
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 900,
) -> list[dict[str, Any]]:
    """Run a host in a process of its own, whose HOME and caches lie in `folder`, and return its outcomes."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ, "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), **(env or {}),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(list(jobs)), capture_output=True, text=True,
        env=environment, cwd=folder, timeout=timeout_s, check=False,
    )  # fmt: skip
    if done.returncode:
        raise AssertionError(f"the host exited with {done.returncode}\n{done.stdout}\n{done.stderr}")
    outcomes: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return outcomes


if __name__ == "__main__":
    print(json.dumps([run_job(job) for job in json.load(sys.stdin)]))
