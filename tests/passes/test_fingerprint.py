"""Fingerprints: any edit to what a pass is made of changes its own and no other's (cases 2 and 19)."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from blake3 import blake3

from fuse_cache.passes.fingerprint import Fingerprints, fingerprints, installed_root
from fuse_cache.passes.order import PLACES, Stage
from fuse_cache.proto.pass_config import PIPELINE, PassConfig, PassContext, Range

FOLDERS = ("passes", "kernels", "proto", "server")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the sources that can be edited."""
    for folder in FOLDERS:
        ignore = shutil.ignore_patterns("__pycache__", "*.pyi", "*.proto")
        shutil.copytree(installed_root() / folder, tmp_path / folder, ignore=ignore)
    return tmp_path


def edit(tree: Path, path: str) -> None:
    file = tree / path
    file.write_text(file.read_text() + "\nEDITED = True\n")


@pytest.mark.parametrize(
    "path",
    [
        "passes/norm_quant.py",  # the pass
        "passes/base.py",  # its base
        "passes/reading.py",  # a helper
        "passes/rewrite.py",
        "passes/cleanup.py",  # a helper of a helper
        "passes/manager.py",  # what drives it
        "passes/verify.py",
        "passes/fuse_quant.py",  # what it has in common with others
        "kernels/fused_quant/op.py",  # what it inserts
        "kernels/rms_norm/op.py",  # a schema of what that is made of
        "kernels/rms_norm/reference.py",  # a reference
        "kernels/quant_dynamic/reference.py",
        "kernels/library.py",
        "kernels/fused_quant/__init__.py",
    ],
)
def test_an_edit_of_any_part_changes_the_fingerprint(tree: Path, path: str) -> None:
    before = fingerprints(tree)
    edit(tree, path)
    after = fingerprints(tree)
    assert after.passes["norm_quant"] != before.passes["norm_quant"]
    assert after.epoch_sources != before.epoch_sources


@pytest.mark.parametrize("path", ["passes/rounding.py", "passes/manager.py", "passes/order.py"])
def test_an_edit_of_the_manager_or_of_its_rounding_rule_counts_where_no_pass_is_on(
    tree: Path, path: str
) -> None:
    before = fingerprints(tree)
    edit(tree, path)
    assert fingerprints(tree).manager != before.manager


@pytest.mark.parametrize("path", ["passes/functionalization.py", "passes/dump.py", "server/key.py"])
def test_an_unrelated_edit_does_not(tree: Path, path: str) -> None:
    if not (tree / path).exists():
        (tree / path).write_text('"""Not written yet."""\n')
    before = fingerprints(tree)
    edit(tree, path)
    after = fingerprints(tree)
    assert (after.passes["norm_quant"], after.manager) == (before.passes["norm_quant"], before.manager)


def test_an_edit_of_one_pass_leaves_the_others_alone(tree: Path) -> None:
    before = fingerprints(tree).passes
    edit(tree, "passes/functionalization.py")
    after = fingerprints(tree).passes
    assert {name for name in before if before[name] != after[name]} == {"functionalization"}


def test_off_on_edited_and_reordered_are_four_keys(tree: Path) -> None:
    # Case 2: the part of the key that passes contribute, as (name, fingerprint) in order.
    def key(config: PassConfig, found: Fingerprints, *, swapped: bool = False) -> str:
        names = list(config.resolve(PassContext(target="cpu-avx2")).active_passes(Range()))
        if swapped:
            first, second = names.index("eliminate_noops"), names.index("norm_quant")
            names[first], names[second] = names[second], names[first]
        return blake3(repr([(name, found.passes[name]) for name in names]).encode()).hexdigest()

    on, off = PassConfig(), PassConfig(fuse_norm_quant=False)
    unedited = fingerprints(tree)
    keys = [key(off, unedited), key(on, unedited), key(on, unedited, swapped=True)]
    source = tree / "kernels/quant_fp8_static/reference.py"
    line = "return encode("
    assert line in source.read_text()
    source.write_text(source.read_text().replace(line, "return 1.0 * encode("))
    keys.append(key(on, fingerprints(tree)))
    assert len(set(keys)) == 4


def test_the_command_prints_json_without_torch_and_alike_in_every_process(tmp_path: Path) -> None:
    code = (
        "import sys; from fuse_cache.passes.fingerprint import main; main(['--json']); "
        "assert not {'torch', 'triton', 'numpy'} & set(sys.modules)"
    )
    outputs = set()
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env=environment,
            cwd=tmp_path,
        )
        outputs.add(done.stdout)
    (text,) = outputs
    found = json.loads(text)
    assert set(found) == {"passes", "manager", "epoch_sources"}
    assert found["passes"] == fingerprints(installed_root()).passes


def test_a_broken_installation_is_named(tree: Path) -> None:
    (tree / "passes/noop.py").unlink()
    with pytest.raises(FileNotFoundError, match=r"fuse_cache\.passes\.noop"):
        fingerprints(tree)


def test_every_pass_that_is_built_has_its_place_and_no_other_has() -> None:
    assert list(PLACES) == [facts.name for facts in PIPELINE if facts.built]


def test_the_hooks_follow_each_other_in_pipeline_order() -> None:
    stages = [list(Stage).index(place.stage) for place in PLACES.values()]
    assert stages == sorted(stages)


def environment_reads(source: str) -> list[str]:
    """Return what a source reads from the environment."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "getenvb"):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            found += [
                alias.name
                for alias in node.names
                if alias.name in ("environ", "environb", "getenv", "getenvb")
            ]
    return found


@pytest.mark.parametrize("sample", ["import os\nos.environ['X']", "from os import getenv\ngetenv('X')"])
def test_the_scan_for_environment_switches_finds_them(sample: str) -> None:
    assert environment_reads(sample)


def test_no_pass_and_no_kernel_reads_the_environment() -> None:
    # Case 19: what is not in the key must not choose the code.
    root = installed_root()
    for folder in ("passes", "kernels"):
        for path in (root / folder).rglob("*.py"):
            assert environment_reads(path.read_text()) == [], f"{path.name} reads an undeclared variable"
