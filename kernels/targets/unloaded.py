"""What takes the place of loading a compiled kernel where there is no device to load it on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fuse_cache.kernels.targets.cubin import registers_of


def note_registers(autotuner: Any) -> None:
    """Give each compiled variant of an Inductor kernel the register count that loading it would give.

    `CachingAutotuner._dynamic_scale_rblock` decides by it whether more variants are compiled: left out, a
    host would find other kernels than one that compiles natively.
    """
    for result in autotuner.compile_results:
        kernel = result.kernel
        if getattr(kernel, "n_regs", None) is not None:
            continue
        cubin = _cubin_of(kernel)
        if cubin is not None:
            kernel.n_regs = registers_of(cubin)
            kernel.n_spills = 0


def _cubin_of(kernel: Any) -> bytes | None:
    """Return a kernel's machine code, wherever this kind keeps it."""
    raw = getattr(kernel, "cubin_raw", None)
    if raw is None and getattr(kernel, "asm", None):
        raw = kernel.asm.get("cubin")
    if raw is None and getattr(kernel, "cubin_path", None):
        raw = Path(kernel.cubin_path).read_bytes()
    return raw
