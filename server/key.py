"""The key of an artifact: every input of a compilation, named. Built here and nowhere else."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

from fuse_cache.proto.digest import FieldDigest

SCHEMA: Final = 3
_CONTEXT: Final = "fuse-cache 2026 artifact key v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFields:
    """Everything that can change an artifact beyond the request itself, which enters by its digest."""

    request_digest: bytes  # graph, ranges, PassConfig, options, ambient state: proto/request.py
    namespace: str  # tenants never share entries
    passes: tuple[tuple[str, bytes], ...]  # (name, fingerprint) of the active passes in pipeline order
    pass_manager: bytes  # of what runs them and states the rounding: without any pass on, too
    target: str  # "cpu-avx2": an artifact loads on one target
    python: str  # "3.11": wrapper code and extension modules are of one minor version
    torch_fingerprint: bytes  # Inductor's generated code changes with every build of torch
    triton_fingerprint: bytes  # empty where Triton is not installed
    cxx: str  # name, version and machine of the C++ compiler: it writes the kernels
    kernel_sources: bytes  # our kernels, references and their registration
    worker_sources: bytes  # our own steps of a compilation: rebuild, Inductor's settings, flags, packing
    op_modules: tuple[str, ...] = ()  # with their digests: they register operators, may bring lowerings
    schema: int = SCHEMA

    def digest(self) -> bytes:
        """Return the 32 bytes that name the artifact."""
        hasher = FieldDigest(_CONTEXT)
        for field in _FIELDS:
            hasher.add(field, getattr(self, field))
        return hasher.digest()

    def describe(self) -> list[tuple[str, str]]:
        """Return every field by name, as text for people. Holds no secret and no path."""
        described = []
        for field in _FIELDS:
            value = getattr(self, field)
            if field == "passes":
                described += [(f"pass.{name}", fingerprint.hex()) for name, fingerprint in value]
            elif isinstance(value, bytes):
                described.append((field, value.hex()))
            elif isinstance(value, tuple):
                described.append((field, ", ".join(value)))
            else:
                described.append((field, str(value)))
        return described


_FIELDS: Final = tuple(sorted(field.name for field in dataclasses.fields(KeyFields)))


def difference(
    wanted: list[tuple[str, str]], stored: list[tuple[str, str]]
) -> list[tuple[str, str | None, str | None]]:
    """Return (name, wanted, stored) of each described field in which two keys differ; None: absent."""
    ours, theirs = dict(wanted), dict(stored)
    names = [*ours, *(name for name in theirs if name not in ours)]
    return [(n, ours.get(n), theirs.get(n)) for n in names if ours.get(n) != theirs.get(n)]
