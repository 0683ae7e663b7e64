"""A digest per pass of the source that can change what it does. Torch-free: it only reads files.

A fingerprint covers the pass's module and every module of passes/, kernels/ and proto/ that it reaches by
imports (bases, helpers, patterns, the kernels it inserts and their op schemas), and the manager that drives
it. The manager has one of its own too: it chooses the rounding of graphs for which no pass is on.
`epoch_sources` covers every source that takes part in a compilation. Run as `python -m
fuse_cache.passes.fingerprint --json`.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from fuse_cache.passes.order import PLACES

PACKAGE = "fuse_cache"
MANAGER = "fuse_cache.passes.manager"
# What only tells about a compilation cannot change it.
TELLS_ONLY = frozenset(
    {"fuse_cache.passes.dump", "fuse_cache.passes.record", "fuse_cache.passes.fingerprint"}
)
_EPOCH_FOLDERS = ("passes", "kernels", "server/worker")


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """`passes` maps each pass to 64 hex digits; `manager` is that of what runs them, whichever are on;
    `epoch_sources` is one digest over all sources."""

    passes: dict[str, str]
    manager: str
    epoch_sources: str


def installed_root() -> Path:
    """Return the folder that holds passes/, kernels/ and proto/ of this installation."""
    return Path(__file__).parent.parent


def fingerprints(root: Path) -> Fingerprints:
    """Measure every pass of `PLACES` from the sources under `root`.

    Raises:
        FileNotFoundError: a pass has no source file there. The installation is broken.
    """
    sources = _Sources(root)
    driver = sources.reach(MANAGER)
    return Fingerprints(
        passes={name: sources.digest(sources.reach(place.module) | driver) for name, place in PLACES.items()},
        manager=sources.digest(driver),
        epoch_sources=_epoch_digest(root),
    )


class _Sources:
    """The modules under one root, each read and parsed once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._bytes: dict[str, bytes] = {}
        self._imports: dict[str, frozenset[str]] = {}

    def reach(self, module: str) -> set[str]:
        """Return the module and all that it imports, directly or not, of this package."""
        if self._path(module) is None:
            raise FileNotFoundError(f"no source file for {module} under {self._root}")
        found: set[str] = set()
        waiting = [module]
        while waiting:
            name = waiting.pop()
            if name not in found and name not in TELLS_ONLY:
                found.add(name)
                waiting.extend(self._imported_by(name))
        return found

    def digest(self, modules: Iterable[str]) -> str:
        """Return the digest of these modules' names and sources."""
        hasher = blake3(b"fuse-cache pass fingerprint v1")
        for name in sorted(modules):
            _feed(hasher, name.encode(), self._read(name))
        return hasher.hexdigest()

    def _path(self, module: str) -> Path | None:
        parts = module.split(".")
        if parts[0] != PACKAGE or len(parts) < 2:
            return None
        base = self._root.joinpath(*parts[1:])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path
        return None

    def _read(self, module: str) -> bytes:
        if module not in self._bytes:
            path = self._path(module)
            assert path is not None
            self._bytes[module] = path.read_bytes()
        return self._bytes[module]

    def _imported_by(self, module: str) -> frozenset[str]:
        if module not in self._imports:
            names = _import_names(self._read(module))
            # Importing a.b.c runs a.b's __init__ too.
            parents = {name.rsplit(".", depth)[0] for name in names for depth in range(name.count("."))}
            self._imports[module] = frozenset(
                name for name in names | parents if self._path(name) is not None
            )
        return self._imports[module]


@functools.lru_cache(maxsize=1024)
def _import_names(source: bytes) -> frozenset[str]:
    """Return every module that a source may import, and every name that could be one."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def _epoch_digest(root: Path) -> str:
    hasher = blake3(b"fuse-cache epoch sources v1")
    for folder in _EPOCH_FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            _feed(hasher, path.relative_to(root).as_posix().encode(), path.read_bytes())
    return hasher.hexdigest()


def _feed(hasher: blake3, *parts: bytes) -> None:
    for part in parts:
        hasher.update(len(part).to_bytes(8, "big"))
        hasher.update(part)


def main(arguments: list[str] | None = None) -> int:
    """Print the fingerprints of this installation, or of the tree given by --root."""
    parser = argparse.ArgumentParser(prog="python -m fuse_cache.passes.fingerprint", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--root", type=Path, default=installed_root(), help="the folder that holds passes/")
    options = parser.parse_args(arguments)
    found = fingerprints(options.root)
    if options.json:
        print(json.dumps(dataclasses.asdict(found)))
    else:
        totals = {"manager": found.manager, "epoch_sources": found.epoch_sources}
        for name, digest in {**found.passes, **totals}.items():
            print(f"{name:<20} {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
