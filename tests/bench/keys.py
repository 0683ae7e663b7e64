"""One graph, one digest: asked in 20 processes that differ in all that must not matter."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench.row import Row

PROCESSES = 20
PROBE = """
from fuse_cache.client.graph import encode_graph
from tests.models import capture_model
import torch
print(encode_graph(capture_model("llama", torch.bfloat16, "dynamic").gm).digest.hex())
"""


def measure() -> list[Row]:
    """Count the different digests that `PROCESSES` processes compute, two at a time."""
    digests: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        for first in range(0, PROCESSES, 2):
            pair = []
            for number in (first, first + 1):
                home = Path(name) / f"home-{number}"
                home.mkdir()
                environment = {
                    **os.environ, "HOME": str(home), "PYTHONHASHSEED": str(number), "RANK": str(number),
                    "LOCAL_RANK": str(number % 8), "CUDA_VISIBLE_DEVICES": str(number % 8),
                    "TMPDIR": str(home),
                }  # fmt: skip
                pair.append(
                    subprocess.Popen(
                        [sys.executable, "-c", PROBE],
                        cwd=home,
                        env=environment,
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                )
            for process in pair:
                out, _ = process.communicate(timeout=300)
                digests.append(out.split()[-1])
    return [
        Row(
            what=f"different digests of one graph in {len(digests)} processes",
            value=len(set(digests)),
            unit="",
            bar=1,
        )
    ]
