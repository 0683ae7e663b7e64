"""Loads an artifact's kernels from memory, and offers what its Python calls. Needs no compiler, no cache
folder and no writable disk.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable
from typing import Any, Final

import torch

from fuse_cache.client.forklock import ForkLock
from fuse_cache.client.memory_file import as_file

# Once any kernel is loaded: see `_use_one_thread`.
_kernels: dict[str, Callable[..., None]] = {}
_lock = ForkLock()  # Guards _kernels, and that a library is loaded once. Held while one is loaded (0.3 ms).


class NativeLoadError(Exception):
    """A kernel cannot be loaded here: a library or symbol is missing, or nothing may be executed from
    memory or disk.
    """


def kernel(digest: str, library: bytes) -> Callable[..., None]:
    """Return the kernel in the shared library `library`, loaded once per process for each `digest`: that of
    `library_digest`. Safe for concurrent use.

    Raises:
        NativeLoadError: this host cannot load it, or the library has another digest: kept under that name it
            would be called for every later artifact that means the right one.
    """
    with _lock:
        found = _kernels.get(digest)
        if found is None:
            if library_digest(library) != digest:
                raise NativeLoadError(
                    f"a kernel of {len(library)} bytes does not fit its digest {digest[:16]}"
                )
            found = _kernels[digest] = _load(library)
        return found


def library_digest(library: bytes) -> str:
    """Return the name of a kernel's library: the first half of its SHA-256, in hex."""
    return hashlib.sha256(library).hexdigest()[:32]


def _load(library: bytes) -> Callable[..., None]:
    # Inductor's bindings take this address from the environment, its own loader sets it in the same way.
    guards: Any = torch._C._dynamo.guards
    address = guards._torchinductor_pyobject_tensor_data_ptr
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(address)
    try:
        with as_file(library) as path:
            # Not through importlib: it keeps single-phase modules by file name and would give the first of
            # all `kernel` modules.
            handle = ctypes.PyDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
        init = handle.PyInit_kernel
        init.restype = ctypes.py_object
        loaded: Callable[..., None] = init().kernel
    except (OSError, AttributeError, RuntimeError) as error:
        raise NativeLoadError(f"a kernel cannot be loaded on this host: {error}") from error
    return loaded


def _use_one_thread() -> None:
    """Keep a forked child from waiting for ever.

    GNU's OpenMP keeps the parent's threads, which a fork does not copy: the first parallel loop in the child
    would wait for them. With one thread it asks for none; PyTorch's own data loader does the same.
    """
    if _kernels:
        torch.set_num_threads(1)


os.register_at_fork(after_in_child=_use_one_thread)


class ExternKernels:
    """The library calls of an artifact, `extern_kernels.mm(...)`. The usual ones are torch's own; others
    are asked of Inductor.
    """

    mm = staticmethod(torch.mm)
    addmm = staticmethod(torch.addmm)
    bmm = staticmethod(torch.bmm)
    baddbmm = staticmethod(torch.baddbmm)

    def __getattr__(self, name: str) -> Any:
        from torch._inductor.select_algorithm import extern_kernels

        found = getattr(extern_kernels, name)
        setattr(self, name, found)
        return found


EXTERN_KERNELS: Final = ExternKernels()
