"""GPU contents of a worker's own build, on a machine without a GPU: what is in them, and what is not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fuse_cache.kernels.targets.cubin import architecture_of
from fuse_cache.proto.container import pack, unpack
from fuse_cache.proto.gpu_kernel import decode_kernel, encode_kernel

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
PROVES = """
import sys
from pathlib import Path
from fuse_cache.server.worker.proof import prove
from fuse_cache.server.worker.protocol import BuildFailed, Job
for path in map(Path, sys.argv[1:]):
    job = Job(job_id="proof", dir=path.parent, graph=path.read_bytes(), request=b"")
    try:
        print(prove(job, lambda stage, detail: None).content.decode())
    except BuildFailed as error:
        print(error.reason, error.message.replace(chr(10), " "))
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
    if target == "sm_90":
        _check_that_damage_is_told(sections, kernel, tmp_path)


def _check_that_damage_is_told(sections: dict[str, bytes], kernel: str, folder: Path) -> None:
    """The proof before publishing lets the whole artifact pass and refuses each kind of incomplete one."""
    name = next(key.removeprefix("gpu/") for key in sections if key.startswith("gpu/") and kernel in key)
    described = decode_kernel(sections[f"gpu/{name}"])
    cubin = f"cubin/{described.variants[0].cubin}"
    wrapper = sections["wrapper"].decode()
    damaged = {
        "whole": sections,
        "no machine code": {key: data for key, data in sections.items() if key != cubin},
        "another function": {
            **sections, f"gpu/{name}": encode_kernel(msgspec.structs.replace(described, entry="other"))
        },
        "no description": {key: data for key, data in sections.items() if key != f"gpu/{name}"},
        "no ELF file": {**sections, cubin: b"source"},
        "compiles": {
            **sections,
            "wrapper": (wrapper + "import triton\ntriton.compile(None)\n").encode(),
        },
        "starts a compiler": {
            **sections,
            "wrapper": (wrapper + "import subprocess\nsubprocess.run(['g++'])\n").encode(),
        },
    }  # fmt: skip
    for number, parts in enumerate(damaged.values()):
        (folder / f"{number}.content").write_bytes(pack(parts))
    done = subprocess.run(
        [sys.executable, "-c", PROVES, *(str(folder / f"{number}.content") for number in range(7))],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = dict(zip(damaged, done.stdout.splitlines(), strict=True))
    assert told["whole"] == "proven"
    for what in ("no machine code", "another function", "no description", "no ELF file"):
        assert f"kernel {name}" in told[what], (what, told[what])
    assert "triton.compile" in told["compiles"]
    assert "subprocess.Popen" in told["starts a compiler"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_dynamic_llama_becomes_one_small_content(tmp_path: Path) -> None:
    facts, sections = _build("sm_90", "llama-dynamic", tmp_path)
    assert facts["bytes"] < 200_000
    assert facts["cubins"] >= len(facts["kernels"]) > 3
    assert not [name for name in sections if name.startswith("so/")]
