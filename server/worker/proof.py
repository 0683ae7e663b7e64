"""Shows that a GPU artifact is whole before it is published: a fresh process loads it as a host would, with
everything that compiles booby-trapped.

A host may have no compiler, no Triton cache and another Python: what it would have to make itself must be
found out here. The process is a fork of the fork server that has built nothing, in empty folders of its own.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NoReturn

import torch

from fuse_cache.client.loader import ArtifactLoadError, load
from fuse_cache.kernels.targets.cubin import CubinError, architecture_of, functions_of
from fuse_cache.proto.container import unpack
from fuse_cache.proto.gpu_kernel import GpuKernel, decode_kernel
from fuse_cache.server.worker.errors import NotCacheable
from fuse_cache.server.worker.protocol import Built, Emit, Job

_STAGE: Final = "prove"


class CompiledError(Exception):
    """Loading an artifact reached for a compiler."""


def prove(job: Job, emit: Emit) -> Built:
    """Load the content that lies where a job's graph does.

    Raises:
        NotCacheable: a host would have to compile a part of it. The message names the kernel or the step.
    """
    emit(_STAGE, "")
    sections = unpack(job.graph)
    kernels = {
        name.removeprefix("gpu/"): decode_kernel(data)
        for name, data in sections.items()
        if name.startswith("gpu/")
    }
    carried = {
        name.removeprefix("cubin/"): data for name, data in sections.items() if name.startswith("cubin/")
    }
    for name, kernel in sorted(kernels.items()):
        _check_kernel(name, kernel, carried)
    asked: list[str] = []
    with _trapped(), _as_on_a_host():
        try:
            artifact = load(job.graph, elsewhere=asked.append)
        except (ArtifactLoadError, CompiledError) as error:
            raise NotCacheable(f"a host cannot load it: {error}", stage=_STAGE) from error
    unknown = sorted(set(asked) - set(kernels))
    if unknown:
        raise NotCacheable(f"kernel {unknown[0]} is called and not carried", stage=_STAGE)
    target = artifact.spec.target
    for name, kernel in sorted(kernels.items()):
        for variant in kernel.variants:
            if architecture_of(carried[variant.cubin]) != target:
                raise NotCacheable(f"kernel {name} is not for {target}", stage=_STAGE)
    return Built(content=b"proven")


def _check_kernel(name: str, kernel: GpuKernel, carried: Mapping[str, bytes]) -> None:
    for variant in kernel.variants:
        cubin = carried.get(variant.cubin)
        if cubin is None:
            raise NotCacheable(f"kernel {name} has no machine code for {variant.config}", stage=_STAGE)
        try:
            functions = functions_of(cubin)
        except CubinError as error:
            raise NotCacheable(f"kernel {name}: {error}", stage=_STAGE) from error
        if kernel.entry not in functions:
            raise NotCacheable(f"kernel {name}: its machine code has no {kernel.entry}", stage=_STAGE)


def _trap(what: str) -> Callable[..., NoReturn]:
    def sprung(*args: object, **kwargs: object) -> NoReturn:
        raise CompiledError(f"it calls {what}")

    return sprung


@contextlib.contextmanager
def _trapped() -> Iterator[None]:
    """Let nothing compile while the block lasts: no Triton kernel, no C++, no other program."""
    import triton
    from torch._inductor.async_compile import AsyncCompile

    traps: list[tuple[Any, str]] = [
        (triton, "compile"),
        (triton.compiler, "compile"),
        (triton.compiler.compiler, "compile"),
        (triton.runtime.jit.JITFunction, "run"),
        (AsyncCompile, "triton"),
        (AsyncCompile, "cpp_pybinding"),
        (subprocess, "Popen"),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name in traps:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, _trap(f"{getattr(owner, '__name__', owner)}.{name}"))
        yield


@contextlib.contextmanager
def _as_on_a_host() -> Iterator[None]:
    """Give a torch without CUDA the one name that wrappers take from torch and that CUDA builds have."""
    guards: Any = torch._C._dynamo.guards
    name = "_empty_strided_cuda"
    if hasattr(guards, name):
        yield
        return
    setattr(guards, name, _trap(name))
    try:
        yield
    finally:
        delattr(guards, name)
