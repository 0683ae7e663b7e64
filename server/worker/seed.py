"""The seed: precompiled headers that every compilation starts from, made once per toolchain and then only
read.

A compilation without it spends 6 to 10 s on `cpp_prefix.h`. The folder holds `headers/` and nothing that a
job could have written.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from fuse_cache.kernels.targets.cpu_wheel import build_guard, is_cpu_wheel
from fuse_cache.server.worker.isa import ISA_BUILDS, building_for
from fuse_cache.server.worker.unloaded import unloaded_kernels

HEADERS = "headers"

# The smallest kernel: building it makes the header with the very flags that a job's kernels are built with.
_KERNEL = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(float* out) { at::vec::Vectorized<float>(1.0f).store(out); }
"""


def make_seed(folder: Path, targets: tuple[str, ...] = ("cpu-avx2",)) -> None:
    """Make `folder` a seed for `targets`. Needs a C++ compiler; about 10 s and 150 MB a CPU target. A GPU
    target needs one only where torch was built without CUDA (3 s).

    Headers that are there stay. A reader never sees half a header: each is made beside and renamed.

    Raises:
        torch._inductor.exc.InductorError and others: there is no usable compiler.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    headers = folder / HEADERS
    headers.mkdir(parents=True, exist_ok=True)
    for name in targets:
        isa = ISA_BUILDS.get(name)
        if isa is None:
            if is_cpu_wheel():  # A GPU target: its kernels need no header, but this torch needs a guard.
                build_guard(folder)
            continue
        with tempfile.TemporaryDirectory(dir=folder, prefix=".seed-") as scratch:
            made = Path(scratch) / HEADERS
            use_headers(headers, made)
            before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = scratch
            try:
                with building_for(isa, made), unloaded_kernels():
                    CppPythonBindingsCodeCache.load_pybinding(["float*"], _KERNEL)
            finally:
                if before is None:
                    del os.environ["TORCHINDUCTOR_CACHE_DIR"]
                else:
                    os.environ["TORCHINDUCTOR_CACHE_DIR"] = before
            for path in sorted(made.iterdir()):  # "x.h" sorts before "x.h.gch", which is what makes it count
                if not path.is_symlink():
                    path.replace(headers / path.name)


def use_headers(headers: Path, private: Path) -> None:
    """Make `private` a writable folder that shows the headers of the read-only folder `headers` by links.
    What is there stays.
    """
    private.mkdir(parents=True, exist_ok=True)
    if headers.is_dir():
        for path in headers.iterdir():
            with contextlib.suppress(FileExistsError):
                (private / path.name).symlink_to(path.resolve())
