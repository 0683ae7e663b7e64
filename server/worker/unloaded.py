"""Compiles Inductor's C++ kernels without loading them.

A worker has no use for a kernel but its bytes, and a target that this machine lacks could not be run here
anyway.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch._inductor.codecache import CppPythonBindingsCodeCache


class UnloadedKernel:
    """Stands where the loaded kernel would; calling it is a mistake."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def __call__(self, *args: object) -> None:
        raise AssertionError("a worker compiles kernels, it does not run them")


@contextlib.contextmanager
def unloaded_kernels() -> Iterator[None]:
    """While the context lasts, a compiled kernel is an `UnloadedKernel`."""

    def load(cls: Any, path: str, key: str) -> ModuleType:
        module = ModuleType(f"{key}.{cls.entry_function}")
        setattr(module, cls.entry_function, UnloadedKernel(path))
        return module

    cache: Any = CppPythonBindingsCodeCache  # Any: torch declares a method, a class method is what it is.
    load_before, kernels_before = cache.__dict__["_load_library_inner"], cache.cache
    cache._load_library_inner = classmethod(load)
    # Kernels are remembered per process by source and flags: ours must not be found later, nor others' now.
    cache.cache = {}
    try:
        yield
    finally:
        cache._load_library_inner, cache.cache = load_before, kernels_before


def kernel_file(argtypes: Sequence[str], source: str) -> Path:
    """Return the shared library of a kernel: the one that was compiled in this context, or a new one.
    Inside `unloaded_kernels`.
    """
    kernel = CppPythonBindingsCodeCache.load_pybinding(argtypes, source)
    assert isinstance(kernel, UnloadedKernel)
    return kernel.path
