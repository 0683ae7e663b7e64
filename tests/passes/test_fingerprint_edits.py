"""Every file of passes/ and kernels/, edited one at a time in a copy: the key of what it is a part of
changes.

Nothing lists the files: a new one is held to the same rule, or has to be named where it only tells.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fuse_cache.passes.fingerprint import TELLS_ONLY, Fingerprints, fingerprints, installed_root
from fuse_cache.passes.order import PLACES
from fuse_cache.proto.pass_config import PassConfig, PassContext, Range
from fuse_cache.server.epoch import kernel_sources
from fuse_cache.server.key import KeyFields

# What a pass is made of as Python itself sees it: the modules that importing it and the manager loads. The
# fingerprint reads import statements instead, so the two know nothing of each other.
LOADED = """
import importlib, json, os, sys
import torch._inductor.compile_fx, torch._inductor.decomposition  # The children then load ours alone.
from fuse_cache.passes.order import PLACES
found = {}
for name, module in {**{n: p.module for n, p in PLACES.items()}, "": "fuse_cache.passes.manager"}.items():
    read, write = os.pipe()
    if os.fork() == 0:
        importlib.import_module(module)
        importlib.import_module("fuse_cache.passes.manager")
        loaded = [n for n in sys.modules if n.startswith(("fuse_cache.passes", "fuse_cache.kernels"))]
        os.write(write, json.dumps(loaded).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        found[name] = json.load(file)
print(json.dumps(found))
"""


def parts_of(path: str, loaded: dict[str, set[str]]) -> list[str]:
    """Return the passes that a file is a part of. A kernel is loaded when it is first called: it belongs to
    whoever loads its operator, in the same folder."""
    module = module_of(path)
    folder = module.rpartition(".")[0] if path.count("/") == 2 else module
    return [name for name in PLACES if module in loaded[name] or f"{folder}.op" in loaded[name]]


def module_of(path: str) -> str:
    parts = Path(path).with_suffix("").parts
    return ".".join(("fuse_cache", *(part for part in parts if part != "__init__")))


FILES = sorted(
    path.relative_to(installed_root()).as_posix()
    for folder in ("passes", "kernels")
    for path in (installed_root() / folder).rglob("*.py")
)


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """Pass -> the modules that it is made of; "" is the manager alone."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOADED], check=True, capture_output=True, text=True, timeout=120
    )
    return {name: set(modules) for name, modules in json.loads(done.stdout).items()}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of all sources that can be edited, and of what is beside them."""
    root = tmp_path_factory.mktemp("tree")
    for folder in ("passes", "kernels", "proto", "server", "client"):
        shutil.copytree(
            installed_root() / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "*.pyi")
        )
    (root / "README.md").write_text("# fuse-cache\n")
    (root / "tests").mkdir()
    (root / "tests" / "test_one.py").write_text("")
    return root


class Keys:
    """The keys of one request with each pass alone, and with none, under the sources of a tree."""

    def __init__(self, tree: Path) -> None:
        self.found: Fingerprints = fingerprints(tree)
        self._kernels = kernel_sources(tree)

    def of(self, *passes: str) -> bytes:
        return KeyFields(
            request_digest=bytes(32),
            namespace="",
            passes=tuple((name, bytes.fromhex(self.found.passes[name])) for name in passes),
            pass_manager=bytes.fromhex(self.found.manager),
            target="cpu-avx2",
            python="3.11",
            torch_fingerprint=bytes(32),
            triton_fingerprint=b"",
            cxx="",
            kernel_sources=self._kernels,
            worker_sources=bytes(32),
        ).digest()


@pytest.fixture(scope="module")
def before(tree: Path) -> Keys:
    return Keys(tree)


@pytest.mark.parametrize("path", FILES)
def test_an_edit_changes_the_key_of_every_pass_that_the_file_is_a_part_of(
    tree: Path, before: Keys, loaded: dict[str, set[str]], path: str
) -> None:
    module = module_of(path)
    source = (tree / path).read_text()
    (tree / path).write_text(source + "\n# A comment counts: sources are hashed as they are.\n")
    try:
        after = Keys(tree)
    finally:
        (tree / path).write_text(source)
    if module in TELLS_ONLY:
        assert all(after.of(name) == before.of(name) for name in PLACES)
        return
    users = parts_of(path, loaded)
    # Such as their registration; and what compiles them for absent GPUs.
    is_shared = path.startswith("kernels/targets/") or (path.count("/") == 1 and path.startswith("kernels/"))
    assert users or is_shared, f"{path} is a part of no pass and no key: import it, or name it in TELLS_ONLY"
    for name in PLACES if is_shared else users:
        assert after.of(name) != before.of(name), f"{path} can change {name}, but not its key"
    if module in loaded[""]:
        assert after.of() != before.of()
    active = PassConfig().resolve(PassContext(target="cpu-avx2")).active_passes(Range())
    # A pass that serves others alone (split_tidy) is not among them yet.
    assert (after.of(*active) != before.of(*active)) is (is_shared or bool(set(users) & set(active)))
    assert Keys(tree).of(*active) == before.of(*active)  # Put back, it is as it was.


@pytest.mark.parametrize(
    "path",
    ["README.md", "tests/test_one.py", "client/backend.py", "client/explain/page.py", "server/admin.py"],
)
def test_an_unrelated_edit_changes_no_key(tree: Path, before: Keys, path: str) -> None:
    with (tree / path).open("a") as file:
        file.write("\n# edited\n")
    after = Keys(tree)
    assert all(after.of(name) == before.of(name) for name in PLACES)
    assert after.of() == before.of()


def test_another_order_of_the_passes_is_another_key(before: Keys) -> None:
    names = list(PLACES)
    swapped = [names[1], names[0], *names[2:]]
    assert before.of(*swapped) != before.of(*names)


def test_a_file_that_only_tells_exists() -> None:
    assert {module_of(path) for path in FILES} >= TELLS_ONLY
