"""Which facts of a GPU enter a request beside its architecture: those that change what is compiled for it.

tests/kernels/targets/test_facts.py compiles with each fact changed alone and holds this list against what
came out. What is not in it (name, memory, L2, clocks) is asked for by measurements and cost models that a
builder never runs: two products that differ in nothing else share their artifacts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final, TypeAlias

from fuse_cache.proto.gpu_target import ARCHITECTURES, Gpu, UnknownGpuError, find_gpu

Facts: TypeAlias = tuple[tuple[str, int], ...]

# Fact -> the most that any GPU could have of it. A number beyond is no fact, and would only fill a store.
CODE_FACTS: Final = {
    "multiprocessors": 1024,  # how far reductions are split, how many blocks of them suffice
    "threads": 4096,  # resident on a multiprocessor: the same, and how few registers fill it
}


def code_facts(gpu: Gpu) -> Facts:
    """Return the facts of `gpu` that change code, in the order of their names."""
    return (("multiprocessors", gpu.multiprocessors), ("threads", gpu.architecture.threads))


def requested(name: str) -> tuple[str, Facts]:
    """Return what a target's name means in a request: ("sm_90", facts of the H200) of "h200".

    A name that is no GPU stands for itself and has no facts.
    """
    try:
        gpu = find_gpu(name)
    except UnknownGpuError:
        return name, ()
    return gpu.target, code_facts(gpu)


def gpu_of(target: str, facts: Iterable[tuple[str, object]]) -> Gpu:
    """Return the GPU that a request means: the first of architecture `target`, with `facts` in place of its
    own.

    Raises:
        UnknownGpuError: there is no such architecture, or a fact is none of CODE_FACTS or cannot be.
    """
    if target not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnknownGpuError(f"{target} is no architecture of this version: use one of {known}")
    gpu = find_gpu(target)
    for name, value in facts:
        most = CODE_FACTS.get(name)
        if most is None:
            raise UnknownGpuError(f"{name} is no fact of a GPU: use {', '.join(sorted(CODE_FACTS))}")
        if type(value) is not int or not 1 <= value <= most:
            raise UnknownGpuError(f"a GPU with {name} = {value!r}: give an integer from 1 to {most}")
        if name == "multiprocessors":
            gpu = dataclasses.replace(gpu, multiprocessors=value)
        else:
            gpu = dataclasses.replace(gpu, architecture=dataclasses.replace(gpu.architecture, threads=value))
    return gpu
