"""Compiling for GPUs that are not here: what is patched, that it is all put back, and what comes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo import device_interface

from fuse_cache.kernels.targets import upstream
from fuse_cache.kernels.targets.shim import UnsupportedTorchError, check_torch, compiling_for
from fuse_cache.kernels.targets.upstream import Patch
from fuse_cache.proto.gpu_target import ARCHITECTURES, find_gpu

# torch's own, the first time a process loads its compiler.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

SCRIPT = Path(__file__).with_name("build_one.py")


def _state() -> dict[str, Any]:
    """Return what the shim touches, as it stands in its module or class."""
    from torch._inductor import config
    from triton.runtime import driver

    found: dict[str, Any] = {
        str(patch): vars(patch.holder()).get(patch.name, "inherited") for patch in upstream.PATCHES
    }
    found["interface"] = device_interface.get_interface_for_device("cuda")
    found["driver"] = driver._active
    return found | {f"config.{name}": value for name, value in config.get_config_copy().items()}


def test_this_torch_has_every_attribute_that_is_patched() -> None:
    check_torch()


def test_an_attribute_that_moved_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = (
        Patch("torch._inductor.compile_fx", "was_here_once", "", lambda gpu: None),
        Patch("torch._inductor.no_such_module", "anything", "", lambda gpu: None),
    )
    before = _state()
    monkeypatch.setattr(upstream, "PATCHES", (*upstream.PATCHES, *moved))
    with (
        pytest.raises(UnsupportedTorchError, match=r"compile_fx\.was_here_once, .*no_such_module\.anything"),
        compiling_for(find_gpu("sm_90")),
    ):
        pytest.fail("a build began")
    monkeypatch.undo()
    assert _state() == before


def test_a_release_that_nobody_has_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.14.0+cpu")
    with pytest.raises(UnsupportedTorchError, match=r"torch 2\.14: read and tried are 2\.11 and 2\.13"):
        check_torch()


class _SomethingBroke(Exception):
    pass


def _look_and_break(before: dict[str, Any]) -> None:
    with compiling_for(find_gpu("a100")):
        assert torch.cuda.get_device_capability() == (8, 0)
        assert torch.cuda.get_device_properties(0).multi_processor_count == 108
        assert device_interface.get_interface_for_device("cuda").get_compute_capability() == 80
        changed = [name for name, value in _state().items() if value != before[name]]
        assert {"interface", "driver"} <= set(changed)
        raise _SomethingBroke


def test_all_is_as_it_was_also_after_an_error() -> None:
    before = _state()
    with pytest.raises(_SomethingBroke):
        _look_and_break(before)
    assert _state() == before
    assert not torch.cuda.is_available()


def _build(folder: Path, guard: Path, *arguments: str) -> dict[str, Any]:
    env = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TRITON_DISABLE_LINE_INFO": "1",  # Line tables hold paths.
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT), arguments[0], str(guard), *arguments[1:]],
        capture_output=True, text=True, env=env, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return outcome


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the device guard that a CPU build of torch needs."""
    return tmp_path_factory.mktemp("guard")


@pytest.mark.parametrize(
    "target", ["sm_90", *(pytest.param(t, marks=pytest.mark.slow) for t in ARCHITECTURES if t != "sm_90")]
)
def test_a_graph_becomes_cubins_for_the_target_that_a_binary_alone_can_launch(
    target: str, guard: Path, tmp_path: Path
) -> None:
    outcome = _build(tmp_path, guard, target)
    assert outcome["architectures"] == [target]
    assert outcome["cubins"]
    assert all(0 < count <= 255 for count in outcome["registers"])
    assert len(outcome["static"]) == outcome["source"].count("async_compile.triton(")


@pytest.mark.slow
def test_another_process_makes_the_same_machine_code(guard: Path, tmp_path: Path) -> None:
    first, second = (_build(tmp_path / name, guard, "sm_90") for name in "ab")
    assert first["cubins"] == second["cubins"]
