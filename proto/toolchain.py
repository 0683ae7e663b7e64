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
from typing import Final, NamedTuple

from blake3 import blake3

from fuse_cache.proto import artifact_pb2
from fuse_cache.proto.errors import ToolchainError
from fuse_cache.proto.folders import listing

__all__ = ["Toolchain", "ToolchainError", "installed_toolchain", "local_toolchain"]

_CONTEXT: Final = "fuse-cache wheel fingerprint v1"
_SOURCES_CONTEXT: Final = "fuse-cache wheel sources v1"
# Read as it lies on the disk, beside RECORD: an edit or a half-done upgrade of these shows at once.
_VERSION_FILES: Final = {"torch": "torch/version.py", "triton": "triton/__init__.py"}
# Not the distribution's: the CUDA wheel of PyPI is "2.11.0" to pip and "2.11.0+cu130" to itself.
_VERSION: Final = re.compile(r"^__version__[^=\n]*=\s*['\"]([^'\"\n]+)['\"]", re.MULTILINE)
_CUDA: Final = re.compile(r"^cuda[^=\n]*=\s*['\"]([0-9.]+)['\"]", re.MULTILINE)
OWN_PYTHON: Final = f"{sys.version_info.major}.{sys.version_info.minor}"
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
    torch_sources: bytes = b""

    def compatible_with(
        self, builder: Toolchain, *, target: str = "cpu", any_wheel: bool = False
    ) -> str | None:
        """Return why this host cannot use what `builder` built for `target`, or None when it can.

        An artifact for a CPU holds extension modules: of one minor version of Python, and of one build of
        torch. One for a GPU holds Python source and machine code: any Python will do that has the same
        release of torch. With `any_wheel` so will another wheel of that release (CPU instead of CUDA).
        """
        for_gpu = not target.startswith("cpu")
        if self.python != builder.python and not for_gpu:
            return f"built with Python {builder.python}, this host has {self.python}"
        same_wheel = self.torch == builder.torch
        same_release = _public(self.torch) == _public(builder.torch)
        if not same_wheel and not (any_wheel and same_release):
            return f"built with torch {builder.torch}, this host has {self.torch}"
        # Wheels for two minor versions differ in their libraries, but not in what writes and runs wrappers.
        what = "torch_fingerprint" if same_wheel and self.python == builder.python else "torch_sources"
        if getattr(self, what) != getattr(builder, what):
            return f"built with another build of torch {self.torch} ({_differ(builder, self, what)})"
        if not for_gpu:
            return None
        if self.triton != builder.triton:
            return f"built with triton {builder.triton or '(none)'}, this host has {self.triton or '(none)'}"
        if self.python == builder.python and self.triton_fingerprint != builder.triton_fingerprint:
            differ = _differ(builder, self, "triton_fingerprint")
            return f"built with another build of triton {self.triton} ({differ})"
        return None

    def same_release(self, other: Toolchain) -> bool:
        """Tell whether both have one release of torch, whatever their Python and wheel."""
        return _public(self.torch) == _public(other.torch) and self.torch_sources == other.torch_sources

    def to_message(self) -> artifact_pb2.Toolchain:
        """Return it as a message."""
        return artifact_pb2.Toolchain(
            python=self.python,
            torch=self.torch,
            triton=self.triton,
            torch_fingerprint=self.torch_fingerprint,
            triton_fingerprint=self.triton_fingerprint,
            cuda=self.cuda,
            torch_sources=self.torch_sources,
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
            torch_sources=message.torch_sources,
        )

    def __str__(self) -> str:
        triton = f", triton {self.triton}" if self.triton else ""
        return f"Python {self.python}, torch {self.torch}{triton} ({self.torch_fingerprint.hex()[:8]})"


def _public(version: str) -> str:
    """Return a version without its local part: "2.13.0" of "2.13.0+cpu"."""
    return version.partition("+")[0]


def _differ(builder: Toolchain, host: Toolchain, what: str) -> str:
    theirs, ours = (getattr(side, what).hex()[:8] or "none" for side in (builder, host))
    return f"fingerprint {theirs}, this host has {ours}"


def local_toolchain() -> Toolchain:
    """Return what this interpreter has. Taken again when a file that says so changed on the disk.

    Raises:
        ToolchainError: torch is not installed, or not from a wheel.
    """
    return installed_toolchain(tuple(sys.path))


def installed_toolchain(search_path: tuple[str, ...], python: str = OWN_PYTHON) -> Toolchain:
    """Return what is installed in the folders of `search_path`, for this version of Python.

    Raises:
        ToolchainError: torch is not among it, or not from a wheel.
    """
    torch_record = _find_record("torch", search_path)
    if torch_record is None:
        raise ToolchainError("torch is not installed: pip install torch")
    torch = _wheel("torch", torch_record)
    triton_record = _find_record("triton", search_path)
    triton = _wheel("triton", triton_record) if triton_record else _NO_WHEEL
    return Toolchain(
        python=python,
        torch=torch.version,
        triton=triton.version,
        torch_fingerprint=torch.fingerprint,
        triton_fingerprint=triton.fingerprint,
        cuda=torch.cuda,
        torch_sources=torch.sources,
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


class _Wheel(NamedTuple):
    version: str = ""
    fingerprint: bytes = b""
    sources: bytes = b""  # of its Python files, but the one that says which wheel it is
    cuda: str = ""


_NO_WHEEL: Final = _Wheel()


def _wheel(name: str, record: Path) -> _Wheel:
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
) -> _Wheel:
    """Do the work of `_wheel`; the stamps are there to miss when a file changed."""
    rows = sorted(filter(_counts, record.read_text(encoding="utf-8").splitlines()))
    version_source = version_file.read_bytes()
    hasher = blake3(derive_key_context=_CONTEXT)
    hasher.update("\n".join(rows).encode())
    hasher.update(b"\0" + version_source)
    text = version_source.decode("utf-8", "replace")
    version = _VERSION.search(text)
    cuda = _CUDA.search(text) if name == "torch" else None
    sources = [row for row in rows if _is_source(row, _VERSION_FILES[name])]
    return _Wheel(
        version=version.group(1) if version else importlib.metadata.PathDistribution(record.parent).version,
        fingerprint=hasher.digest(),
        sources=blake3("\n".join(sources).encode(), derive_key_context=_SOURCES_CONTEXT).digest(),
        cuda=cuda.group(1) if cuda else "",
    )


def _is_source(row: str, version_file: str) -> bool:
    path = _path(row)
    return path.endswith(".py") and path != version_file


def _path(row: str) -> str:
    return row.rsplit(",", 2)[0].strip('"')


def _counts(row: str) -> bool:
    """Say whether a row of RECORD is the same in every install of the wheel."""
    path = _path(row)
    return not (
        path.startswith(("..", "/"))
        or path.endswith(".pyc")
        or (".dist-info/" in path and _INSTALLER_NOTES.match(path))
    )
