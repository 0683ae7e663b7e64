"""Which C++ compiler workers will use, told apart without torch: artifacts hold what it makes of kernels.

It is chosen as Inductor chooses it: the program that CXX names, else `g++`, looked for on PATH. (CC compiles
only Triton's launch stubs, which no artifact carries.)
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT = "g++"
ANSWER_S = 20.0  # A loaded machine may take a second to run it.
NONE = "none"  # Builds fail then; the key must still have a value.


@dataclass(frozen=True, slots=True)
class CxxProgram:
    """The program, and what the file system says of it: another one, or an upgrade, is not equal."""

    path: str  # empty: there is none
    stamp: tuple[int, int, int, int]


def find_cxx(environment: Mapping[str, str] = os.environ) -> CxxProgram:
    """Look for the compiler: some calls of stat."""
    path = shutil.which(environment.get("CXX") or DEFAULT, path=environment.get("PATH"))
    try:
        info = os.stat(path or "")
    except OSError:
        return CxxProgram("", (0, 0, 0, 0))
    # Links are followed: `g++` may be switched to another version without being touched.
    path = os.path.realpath(path or "")
    return CxxProgram(path, (info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino))


def cxx_identity(program: CxxProgram) -> str:
    """Return "gcc version 12.2.0 (Debian 12.2.0-14), x86_64-linux-gnu" and the like: no path is in it.

    Blocking: it runs the compiler, 5 ms.
    """
    if not program.path:
        return NONE
    try:
        done = subprocess.run(
            [program.path, "-v"], capture_output=True, timeout=ANSWER_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return NONE
    lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines()]
    # gcc and clang both say these two of themselves, among folders of this machine.
    version = next((line for line in lines if " version " in line and "/" not in line), "")
    target = next((line.partition(":")[2].strip() for line in lines if line.startswith("Target:")), "")
    return ", ".join(part for part in (version, target) if part) or NONE
