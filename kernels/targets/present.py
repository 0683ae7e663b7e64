"""Compiles for the GPU that is here. The counterpart of `shim.py`, which does it for one that is not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Final

import torch

from fuse_cache.kernels.targets.launchable import LAUNCHABLE, known_config
from fuse_cache.proto.gpu_target import Gpu

_CONFIG: Final[Mapping[str, object]] = {
    "triton.autotune_at_compile_time": True,
    # It compares sizes with 1 before it measures, and the guards that this leaves shut such calls out.
    "shape_padding": False,
    # Each of several is a process that imports torch, and a build's memory is limited as a whole.
    "compile_threads": 1,
}


def is_present(gpu: Gpu) -> bool:
    """Tell whether the current device of this process is `gpu`, as far as that changes code."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return False
    found = torch.cuda.get_device_properties()
    here = found.major, found.minor, found.multi_processor_count, found.max_threads_per_multi_processor
    wanted = gpu.architecture
    return here == (wanted.major, wanted.minor, gpu.multiprocessors, wanted.threads)


@contextlib.contextmanager
def compiling_here() -> Iterator[Mapping[str, object]]:
    """Let Inductor compile as it always does, variants measured, but only what a host can launch from its
    machine code. Yields what else must be in its configuration when it compiles.
    """
    import torch._inductor.config as inductor_config

    with inductor_config.patch(known_config(LAUNCHABLE)):
        yield known_config(_CONFIG)
