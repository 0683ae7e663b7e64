"""Which Python, torch and triton are installed, told apart without importing them (20 ms instead of 4 s).

A fingerprint covers the rows of the wheel's RECORD, which has a digest of every file, and the file that holds
the version. Rows that differ between two installs of one wheel do not count: scripts, byte code, what an
installer notes down.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3

from fuse_cache.proto import artifact_pb2
from fuse_cache.proto.errors import ToolchainError
from fuse_cache.proto.folders import listing

__all__ = ["Toolchain", "ToolchainError", "installed_toolchain", "local_toolchain"]

_CONTEXT: Final = "fuse-cache wheel fingerprint v1"
# Read as it lies on the disk, beside RECORD: an edit or a half-done upgrade of these shows at once.
_VERSION_FILES: Final = {"torch": "torch/version.py", "triton": "triton/__init__.py"}
# Not the distribution's: the CUDA wheel of PyPI is "2.11.0" to pip and "2.11.0+cu130" to itself.
_VERSION: Final = re.compile(r"^__version__[^=\n]*=\s*['\"]([^'\"\n]+)['\"]", re.MULTILINE)
_CUDA: Final = re.compile(r"^cuda[^=\n]*=\s*['\"]([0-9.]+)['\"]", re.MULTILINE)
_INSTALLER_NOTES: Final = re.compile(r"[^/]+\.dist-info/(?!METADATA$).*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """The software that builds artifacts, or that a host has. Fields as in `artifact.proto`."""

    python: str
    torch: str
    triton: str = ""
    torch_fingerprint: bytes = b""
    triton_fingerprint: bytes = b""
    cuda: str = ""

    def compatible_with(
        self, builder: Toolchain, *, target: str = "cpu", any_wheel: bool = False
    ) -> str | None:
        """Return why this host cannot use what `builder` built for `target`, or None when it can.

        With `any_wheel` a build with another wheel of the same torch version (CPU instead of CUDA) is taken.
        """
        if self.python != builder.python:
            return f"built with Python {builder.python}, this host has {self.python}"
        if any_wheel and _public(self.torch) == _public(builder.torch) and self.torch != builder.torch:
            pass
        elif self.torch != builder.torch:
            return f"built with torch {builder.torch}, this host has {self.torch}"
        elif self.torch_fingerprint != builder.torch_fingerprint:
            return f"built with another build of torch {self.torch} ({_differ(builder, self, 'torch')})"
        if target.startswith("cpu"):
            return None
        if self.triton != builder.triton:
            return f"built with triton {builder.triton or '(none)'}, this host has {self.triton or '(none)'}"
        if self.triton_fingerprint != builder.triton_fingerprint:
            return f"built with another build of triton {self.triton} ({_differ(builder, self, 'triton')})"
        return None

    def to_message(self) -> artifact_pb2.Toolchain:
        """Return it as a message."""
        return artifact_pb2.Toolchain(
            python=self.python,
            torch=self.torch,
            triton=self.triton,
            torch_fingerprint=self.torch_fingerprint,
            triton_fingerprint=self.triton_fingerprint,
            cuda=self.cuda,
        )

    @classmethod
    def from_message(cls, message: artifact_pb2.Toolchain) -> Toolchain:
        """Return what a message says."""
        return cls(
            python=message.python,
            torch=message.torch,
            triton=message.triton,
            torch_fingerprint=message.torch_fingerprint,
            triton_fingerprint=message.triton_fingerprint,
            cuda=message.cuda,
        )

    def __str__(self) -> str:
        triton = f", triton {self.triton}" if self.triton else ""
        return f"Python {self.python}, torch {self.torch}{triton} ({self.torch_fingerprint.hex()[:8]})"


def _public(version: str) -> str:
    """Return a version without its local part: "2.13.0" of "2.13.0+cpu"."""
    return version.partition("+")[0]


def _differ(builder: Toolchain, host: Toolchain, what: str) -> str:
    theirs, ours = (getattr(side, f"{what}_fingerprint").hex()[:8] or "none" for side in (builder, host))
    return f"fingerprint {theirs}, this host has {ours}"


def local_toolchain() -> Toolchain:
    """Return what this interpreter has. Taken again when a file that says so changed on the disk.

    Raises:
        ToolchainError: torch is not installed, or not from a wheel.
    """
    return installed_toolchain(tuple(sys.path))


def installed_toolchain(search_path: tuple[str, ...]) -> Toolchain:
    """Return what is installed in the folders of `search_path`, for this interpreter's version of Python.

    Raises:
        ToolchainError: torch is not among it, or not from a wheel.
    """
    torch_record = _find_record("torch", search_path)
    if torch_record is None:
        raise ToolchainError("torch is not installed: pip install torch")
    torch_version, torch_fingerprint, cuda = _wheel("torch", torch_record)
    triton_record = _find_record("triton", search_path)
    triton_version, triton_fingerprint, _ = (
        _wheel("triton", triton_record) if triton_record else ("", b"", "")
    )
    return Toolchain(
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        torch=torch_version,
        triton=triton_version,
        torch_fingerprint=torch_fingerprint,
        triton_fingerprint=triton_fingerprint,
        cuda=cuda,
    )


def _find_record(name: str, search_path: tuple[str, ...]) -> Path | None:
    """Return the wheel's RECORD, which need not exist."""
    for folder in search_path:
        # A folder that this uid may not read holds nothing that it could import.
        names = itertools.chain(*listing(folder or "."))
        found = min((n for n in names if n.startswith(f"{name}-") and n.endswith(".dist-info")), default=None)
        if found is not None:
            return Path(folder, found, "RECORD")
    return None


def _wheel(name: str, record: Path) -> tuple[str, bytes, str]:
    """Return version, fingerprint and CUDA version."""
    version_file = record.parent.parent / _VERSION_FILES[name]
    try:
        return _read_wheel(name, record, _stamp(record), version_file, _stamp(version_file))
    except OSError as error:
        raise ToolchainError(
            f"{name} has no {error.filename} ({error.strerror}), so its builds cannot be told apart: "
            "install it from a wheel"
        ) from error


def _stamp(path: Path) -> tuple[int, int, int]:
    found = os.stat(path)
    return found.st_mtime_ns, found.st_size, found.st_ino


@functools.lru_cache(maxsize=16)
def _read_wheel(
    name: str, record: Path, _record_stamp: object, version_file: Path, _version_stamp: object
) -> tuple[str, bytes, str]:
    """Do the work of `_wheel`; the stamps are there to miss when a file changed."""
    rows = sorted(filter(_counts, record.read_text(encoding="utf-8").splitlines()))
    version_source = version_file.read_bytes()
    hasher = blake3(derive_key_context=_CONTEXT)
    hasher.update("\n".join(rows).encode())
    hasher.update(b"\0" + version_source)
    text = version_source.decode("utf-8", "replace")
    version = _VERSION.search(text)
    cuda = _CUDA.search(text) if name == "torch" else None
    return (
        version.group(1) if version else importlib.metadata.PathDistribution(record.parent).version,
        hasher.digest(),
        cuda.group(1) if cuda else "",
    )


def _counts(row: str) -> bool:
    """Say whether a row of RECORD is the same in every install of the wheel."""
    path = row.rsplit(",", 2)[0].strip('"')
    return not (
        path.startswith(("..", "/"))
        or path.endswith(".pyc")
        or (".dist-info/" in path and _INSTALLER_NOTES.match(path))
    )
