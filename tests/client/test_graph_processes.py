"""Processes that differ in all that must not matter make the same bytes (cases 18 and 53)."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A graph of dynamic sizes with sets, dicts and keyword arguments in the program: what hash seeds reorder.
SMALL = """
import torch
from fuse_cache.client.graph import encode_graph

names = {"alpha", "beta", "gamma", "delta"}

def forward(x, y, *, scales):
    kept = {name: x * scales[name] for name in sorted(names)}
    total = sum(kept.values()) + y.sum()
    return torch.nn.functional.pad(total.reshape(x.shape[0] * 4, -1), value=1.5, pad=(1, 2)), kept["beta"]

x, y = torch.randn(2 + WIDTH, 8), torch.randn(3 + WIDTH, 4)
torch._dynamo.mark_dynamic(x, 0)
torch._dynamo.mark_dynamic(y, 0)

def backend(gm, inputs):
    print(encode_graph(gm, inputs).digest.hex())
    return gm

with torch.no_grad():
    torch.compile(forward, backend=backend)(x, y, scales={name: len(name) for name in names})
"""
MODEL = """
import torch
from tests.captured import encoded_model

print(encoded_model("qwen3", torch.bfloat16, "dynamic").encoded.digest.hex())
"""


def _digest(program: str, number: int, folder: Path) -> str:
    """Run `program` in a process of its own, in which all that can differ between hosts and ranks does."""
    home = folder / f"home{number}"
    home.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); WIDTH = {number}\n{program}"],
        env={
            **os.environ, "HOME": str(home), "TMPDIR": str(home), "PYTHONHASHSEED": str(number * 7919),
            "RANK": str(number), "LOCAL_RANK": str(number), "MASTER_PORT": str(29500 + number),
            "HOSTNAME": f"host{number}", "CUDA_VISIBLE_DEVICES": str(number), "PYTHONSAFEPATH": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"), "OMP_NUM_THREADS": str(1 + number % 2),
        },
        cwd=home, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_two_processes_agree(tmp_path: Path) -> None:
    assert len({_digest(SMALL, number, tmp_path) for number in (0, 5)}) == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_processes_agree_on_a_model(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        digests = set(pool.map(lambda number: _digest(MODEL, number, tmp_path), range(20)))
    assert len(digests) == 1
