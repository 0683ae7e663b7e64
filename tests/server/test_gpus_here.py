"""What the daemon says of a machine's GPUs, with a driver's library that says what a test wants."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fuse_cache.proto.compile_pb2 import Way
from fuse_cache.proto.toolchain import Toolchain
from fuse_cache.server import config, gpus_here
from fuse_cache.server.config import load_config
from fuse_cache.server.gpus_here import architectures_here
from fuse_cache.server.status import way_of

SOURCE = """
extern "C" {
static const int kinds[][2] = {%s};
int nvmlInit_v2() { return %d; }
int nvmlShutdown() { return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = sizeof kinds / sizeof kinds[0]; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  if (kinds[index][0] == 0) return 15;  // a GPU that fell off the bus
  *device = (void*)kinds[index];
  return 0;
}
int nvmlDeviceGetCudaComputeCapability(void* device, int* major, int* minor) {
  *major = ((const int*)device)[0];
  *minor = ((const int*)device)[1];
  return 0;
}
}
"""


def driver(folder: Path, kinds: str, answer: int = 0) -> str:
    """Make a library that stands for the driver's."""
    source, made = folder / "nvml.cpp", folder / "nvml.so"
    source.write_text(SOURCE % (kinds, answer))
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(made)], check=True)
    return str(made)


def test_each_kind_of_gpu_is_named_once_and_one_that_does_not_answer_is_left_out(tmp_path: Path) -> None:
    found = architectures_here(driver(tmp_path, "{9, 0}, {0, 0}, {9, 0}, {8, 9}"))
    assert found == ("sm_90", "sm_89")


def test_no_driver_or_one_that_is_broken_means_no_gpu(tmp_path: Path) -> None:
    assert architectures_here(str(tmp_path / "none.so")) == ()
    assert architectures_here(driver(tmp_path, "{9, 0}", answer=9)) == ()


def test_a_daemon_builds_for_its_own_gpu_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "architectures_here", lambda: ("sm_90", "sm_70"))
    targets = load_config({}, None, {}).target
    assert targets[-1] == "sm_90", "the one of the two that this version has"
    assert all(name.startswith("cpu-") for name in targets[:-1])
    assert load_config({"target": "cpu-avx2"}, None, {}).target == ("cpu-avx2",)


def test_a_build_is_native_where_the_gpu_is_and_torch_can_use_it() -> None:
    with_cuda = Toolchain(python="3.12", torch="2.11.0+cu130", cuda="13.0")
    without = Toolchain(python="3.12", torch="2.11.0+cpu")
    here = ("sm_90",)
    assert way_of("cpu-avx2", with_cuda, here) == Way.WAY_PROCESSOR
    assert way_of("sm_90", with_cuda, here) == Way.WAY_ON_DEVICE
    assert way_of("sm_80", with_cuda, here) == Way.WAY_WITHOUT_DEVICE
    assert way_of("sm_90", without, here) == Way.WAY_WITHOUT_DEVICE
    assert way_of("sm_90", with_cuda, ()) == Way.WAY_WITHOUT_DEVICE


def test_this_machine_is_asked_once() -> None:
    assert gpus_here.architectures_here() is gpus_here.architectures_here()
