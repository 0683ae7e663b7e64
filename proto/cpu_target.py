"""CPU targets: what an artifact for one of them needs of the processor, and what this machine has.

Both sides use it: the daemon to choose its default target, the client to choose "auto" and to refuse a
build for a larger processor. A target fixes the instruction set of the generated code; compiler flags for
it live in server/worker/isa.py.
"""

from __future__ import annotations

import functools
import platform
from dataclasses import dataclass
from pathlib import Path

# x86-64-v3 and -v4 as the psABI lists them, by the names Linux uses in /proc/cpuinfo (lzcnt is "abm" there).
_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@dataclass(frozen=True, slots=True)
class CpuTarget:
    """One CPU target: its name in requests and manifests, and the processor flags that its code may use."""

    name: str
    flags: frozenset[str]


# Best first: the default of a machine is the first that it can run.
CPU_TARGETS: tuple[CpuTarget, ...] = (CpuTarget("cpu-avx512", _V4), CpuTarget("cpu-avx2", _V3))


@functools.cache
def host_flags() -> frozenset[str]:
    """Return the flags of this machine's first processor, or none where they cannot be known (not Linux on
    x86-64).
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def is_cpu_target(name: str) -> bool:
    """Tell whether `name` is a CPU target of this version."""
    return any(target.name == name for target in CPU_TARGETS)


def refusal(name: str, flags: frozenset[str] | None = None) -> str | None:
    """Return why a processor with `flags` (default: this one) cannot run code for the target `name`, or
    None when it can.
    """
    have = host_flags() if flags is None else flags
    for target in CPU_TARGETS:
        if target.name == name:
            missing = sorted(target.flags - have)
            return f"{name} needs {', '.join(missing)}, which this processor lacks" if missing else None
    known = ", ".join(target.name for target in CPU_TARGETS)
    return f"{name} is not a CPU target of this version (known: {known})"


def host_cpu_target(flags: frozenset[str] | None = None) -> str | None:
    """Return the best CPU target that a processor with `flags` (default: this one) can run, or None."""
    return next((target.name for target in CPU_TARGETS if refusal(target.name, flags) is None), None)
