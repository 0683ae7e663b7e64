"""Compiles for the GPU that is here. The counterpart of `shim.py`, which does it for one that is not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Final

import torch

from fuse_cache.kernels.targets.launchable import LAUNCHABLE, known_config

_CONFIG: Final[Mapping[str, object]] = {
    "triton.autotune_at_compile_time": True,
    # It compares sizes with 1 before it measures, and the guards that this leaves shut such calls out.
    "shape_padding": False,
}


def is_present(target: str) -> bool:
    """Tell whether the current device of this process is of the architecture `target`, such as "sm_90"."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return False
    major, minor = torch.cuda.get_device_capability()
    return target == f"sm_{major}{minor}"


@contextlib.contextmanager
def compiling_here() -> Iterator[Mapping[str, object]]:
    """Let Inductor compile as it always does, variants measured, but only what a host can launch from its
    machine code. Yields what else must be in its configuration when it compiles.
    """
    import torch._inductor.config as inductor_config

    with inductor_config.patch(known_config(LAUNCHABLE)):
        yield known_config(_CONFIG)
