"""A Python whose torch this daemon's workers use: its own, or another's that the configuration names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fuse_cache.proto.toolchain import OWN_PYTHON, Toolchain, installed_toolchain

ASK_S = 60.0  # It starts in 30 ms; on a box that swaps, in seconds.
# Says where modules come from and imports none of ours: their dependencies need not be whole to say so.
_QUESTION = """
import importlib.util, json, sys
spec = importlib.util.find_spec("fuse_cache")
print(json.dumps({
    "python": "%d.%d" % sys.version_info[:2],
    "path": sys.path,
    "package": list(spec.submodule_search_locations or ()) if spec else [],
}))
"""


# What its supervisor and fork server, and this process, must say in the same way.
_SPOKEN = ("checked.py", "forkserver.py", "processes.py", "protocol.py", "supervisor.py")


class InterpreterError(RuntimeError):
    """An interpreter cannot be used. The message says what to install or write instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """One Python, as it said of itself."""

    executable: str
    python: str  # "3.12"
    search_path: tuple[str, ...]
    root: Path  # its own fuse_cache: what its workers run, and so what fingerprints are taken of

    @property
    def foreign_path(self) -> tuple[str, ...] | None:
        """Where another interpreter's modules are; None: this process can find them itself."""
        return None if self.executable == sys.executable else self.search_path

    def toolchain(self) -> Toolchain:
        """Return what is installed for it now, read from the disk (20 ms, or 1 where nothing changed).

        Raises:
            ToolchainError: torch is not installed there, or not from a wheel.
        """
        return installed_toolchain(self.search_path, self.python)


def own_interpreter(root: Path) -> Interpreter:
    """Return the one that runs this process."""
    return Interpreter(executable=sys.executable, python=OWN_PYTHON, search_path=tuple(sys.path), root=root)


def ask_interpreter(executable: Path, environment: Mapping[str, str]) -> Interpreter:
    """Ask another one, in the `environment` that its workers get. Blocking.

    Raises:
        InterpreterError: it does not start, is too old, or has no fuse-cache that this daemon can talk to.
    """
    # Without a shell's help: a path is that of a file, or of a program of PATH.
    command = [os.path.expanduser(executable), "-P", "-c", _QUESTION]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=ASK_S, check=False, env=dict(environment), text=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InterpreterError(f"{executable} does not run: {error}; name a Python 3.11 or newer") from error
    if done.returncode:
        last_line = done.stderr.strip().rpartition("\n")[2]
        raise InterpreterError(f"{executable} is no Python 3.11 or newer: {last_line}")
    found = json.loads(done.stdout)
    if not found["package"]:
        raise InterpreterError(
            f"{executable} has no fuse-cache, which its workers run: "
            f"{executable} -m pip install fuse-cache beside its torch"
        )
    root = Path(found["package"][0])
    if not _speaks_as_we_do(root):
        raise InterpreterError(
            f"{executable} has another release of fuse-cache ({root}) than this daemon: "
            "install the same in both"
        )
    return Interpreter(
        executable=str(command[0]),
        python=str(found["python"]),
        search_path=tuple(map(str, found["path"])),
        root=root,
    )


def _speaks_as_we_do(root: Path) -> bool:
    own = Path(__file__).parent / "worker"
    theirs = root / "server" / "worker"
    try:
        return all((theirs / name).read_bytes() == (own / name).read_bytes() for name in _SPOKEN)
    except OSError:
        return False
