"""The files of operator modules: what an operator does is in them, so their names alone make no key."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path

from blake3 import blake3

_CONTEXT = "fuse-cache 2026 operator module v1"


def op_files(module: str, search_path: Sequence[str] | None = None) -> list[Path]:
    """Return the source files of a module, of a package all; none if it is not found. Imports nothing.

    `search_path` is that of another interpreter; this one's own is more than a list of folders.

    What it imports from elsewhere is not covered: name those modules too.
    """
    top, *rest = module.split(".")
    try:
        if search_path is None:
            spec = importlib.util.find_spec(top)
        else:
            spec = importlib.machinery.PathFinder.find_spec(top, list(search_path))
        for depth in range(len(rest)):
            # Not find_spec: it would import the parent, and that may be torch.
            if spec is None or spec.submodule_search_locations is None:
                return []
            name = ".".join((top, *rest[: depth + 1]))
            spec = importlib.machinery.PathFinder.find_spec(name, list(spec.submodule_search_locations))
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        found: Iterable[Path] = (
            path for folder in spec.submodule_search_locations for path in Path(folder).rglob("*.py")
        )
    else:
        found = [Path(spec.origin)] if spec.origin and spec.has_location else []
    return sorted(found)


def op_tags(modules: Iterable[str], search_path: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return each module's name with the digest of its sources, as it stands in keys. Blocking."""
    return tuple(f"{module}@{_digest(module, search_path)}" for module in modules)


def _digest(module: str, search_path: Sequence[str] | None) -> str:
    hasher = blake3(derive_key_context=_CONTEXT)
    for path in op_files(module, search_path):
        data = path.read_bytes()
        hasher.update(f"{path.name}\0{len(data)}\0".encode() + data)
    return hasher.hexdigest()[:32]
