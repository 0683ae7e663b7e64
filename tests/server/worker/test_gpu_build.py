"""GPU contents of a worker's own build, on a machine without a GPU: what is in them, and what is not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fuse_cache.kernels.targets.cubin import architecture_of
from fuse_cache.proto.container import unpack
from fuse_cache.proto.gpu_kernel import decode_kernel

ROOT = Path(__file__).parents[3]
LOADS = """
import sys
import torch
import fuse_cache.client.gpu_kernel as gpu_kernel
import fuse_cache.client.loader as loader
loader.why_not_here = lambda target: None
torch.cuda.current_device = lambda: 5
torch._C._cuda_getCurrentRawStream = lambda index: 0
if not hasattr(torch._C._dynamo.guards, "_empty_strided_cuda"):
    torch._C._dynamo.guards._empty_strided_cuda = None
artifact = loader.load(open(sys.argv[1], "rb").read())
print(len(artifact.spec.inputs), "torch._inductor.async_compile" in sys.modules)
"""


def _build(target: str, name: str, folder: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "gpu" / "build_contents.py"), target, str(folder), name],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts, unpack((folder / name / "content").read_bytes())


@pytest.mark.parametrize(
    ("target", "name", "fusion", "kernel"),
    [
        ("sm_90", "norm-static-fp8", "norm_quant", "rms_norm_kernel"),
        pytest.param("sm_80", "add-norm-token-fp8", "norm_quant", "rms_norm_kernel", marks=pytest.mark.slow),
        pytest.param("sm_100", "gate-group-fp8", "act_quant", "act_and_mul_kernel", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(600)
def test_a_fusion_travels_as_its_own_kernel_and_loads_without_a_compiler(
    target: str, name: str, fusion: str, kernel: str, tmp_path: Path
) -> None:
    facts, sections = _build(target, name, tmp_path)
    assert facts["fusions"] == {fusion: 1}
    assert any(kernel in item for item in facts["kernels"]), facts["kernels"]
    cubins = {key: data for key, data in sections.items() if key.startswith("cubin/")}
    assert {architecture_of(data) for data in cubins.values()} == {target}
    described = [decode_kernel(data) for key, data in sections.items() if key.startswith("gpu/")]
    assert {f"cubin/{variant.cubin}" for item in described for variant in item.variants} == set(cubins)
    wrapper = sections["wrapper"].decode()
    assert not re.search(r"cuda:\d|_DeviceGuard\(\d|set_device\(\d|get_raw_stream\(\d|tl\.|triton\.", wrapper)
    assert "device_index" in wrapper
    done = subprocess.run(
        [sys.executable, "-c", LOADS, str(tmp_path / name / "content")],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[1:] == ["False"]  # What would compile a kernel is not even imported.


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_dynamic_llama_becomes_one_small_content(tmp_path: Path) -> None:
    facts, sections = _build("sm_90", "llama-dynamic", tmp_path)
    assert facts["bytes"] < 200_000
    assert facts["cubins"] >= len(facts["kernels"]) > 3
    assert not [name for name in sections if name.startswith("so/")]
