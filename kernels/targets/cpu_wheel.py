"""Lets a CPU build of torch handle fake tensors on "cuda": for continuous integration and small builders.

Such a build has no device guard for CUDA, and views of fake tensors ask for one. Upstream has a guard that
does nothing; this registers it. What is built this way is marked: a CPU wheel and a CUDA wheel of one release
are two builds of torch (`cpu_wheel_build` of the manifest).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any, Final

import torch

_SOURCE: Final = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
struct Registered {
  Registered() {
    if (!c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) {
      static c10::impl::DeviceGuardImplRegistrar registrar(
          c10::DeviceType::CUDA, new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>());
    }
  }
} registered;
}  // namespace
"""
_STREAM: Final = "_cuda_getCurrentRawStream"  # that wrappers import


class GuardBuildError(RuntimeError):
    """The guard cannot be compiled here. The message has the compiler's words."""


def is_cpu_wheel() -> bool:
    """Tell whether this torch was built without CUDA."""
    return torch.version.cuda is None and torch.version.hip is None


def register_guard(folder: Path) -> None:
    """Register the guard that does nothing, compiled into `folder` where it is not there yet (3 s).

    Raises:
        GuardBuildError
    """
    ctypes.CDLL(str(build_guard(folder)))
    # Wrappers import it; nothing calls it where there is no device.
    if not hasattr(torch._C, _STREAM):
        setattr(torch._C, _STREAM, _no_stream)


def build_guard(folder: Path) -> Path:
    """Return the guard's library in `folder`, compiled into it where it is not there yet.

    Raises:
        GuardBuildError
    """
    name = hashlib.sha256(f"{_SOURCE}{torch.__version__}".encode()).hexdigest()[:16]
    library = folder / f"no_guard_{name}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _build(library)
    return library


def _no_stream(device: int) -> Any:
    raise AssertionError("a builder compiles kernels, it does not launch them")


def _build(library: Path) -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler

    root = Path(torch.__file__).parent
    source, made = library.with_suffix(".cpp"), library.with_suffix(f".{os.getpid()}")
    source.write_text(_SOURCE)
    command = [
        get_cpp_compiler(), "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{root / 'include'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", str(source), "-o", str(made),
        f"-L{root / 'lib'}", "-lc10", f"-Wl,-rpath,{root / 'lib'}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise GuardBuildError(f"{' '.join(command[:3])} failed: {done.stderr[-2000:]}")
    made.rename(library)  # Whole, or not there: another process may be building it too.
