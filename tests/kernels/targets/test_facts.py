"""Which facts of a GPU change what is compiled for it: found out by compiling, and held against the list."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fuse_cache.proto.gpu_target import GPUS, UnknownGpuError, find_gpu
from fuse_cache.proto.target_facts import CODE_FACTS, code_facts, gpu_of, requested

SCRIPT = Path(__file__).with_name("code_by_fact.py")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_facts_of_a_request_are_those_that_change_code(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "sm_90", str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=840,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, bool] = json.loads(done.stdout.splitlines()[-1])
    assert not found.pop("(nothing)"), "two builds for one GPU differ"
    assert found == {**dict.fromkeys(CODE_FACTS, True), "(rest)": False}


@pytest.mark.parametrize("name", GPUS)
def test_a_builder_gets_the_gpu_that_was_asked_for(name: str) -> None:
    target, facts = requested(name)
    assert code_facts(gpu_of(target, facts)) == code_facts(find_gpu(name)) == facts
    assert gpu_of(target, ()) == find_gpu(target)


def test_a_gpu_that_nobody_sells_is_built_for_as_asked() -> None:
    slice_of_one = gpu_of("sm_90", (("multiprocessors", 16), ("threads", 2048)))
    assert (slice_of_one.multiprocessors, slice_of_one.architecture.threads) == (16, 2048)
    assert slice_of_one.memory_bytes == find_gpu("sm_90").memory_bytes


@pytest.mark.parametrize(
    ("target", "facts", "message"),
    [
        ("h200", (), "h200 is no architecture of this version: use one of sm_80, "),
        ("sm_90", (("memory_bytes", 1),), "memory_bytes is no fact of a GPU: use multiprocessors, threads"),
        ("sm_90", (("multiprocessors", 0),), "multiprocessors = 0: give an integer from 1 to 1024"),
        ("sm_90", (("multiprocessors", 1 << 20),), "from 1 to 1024"),
        ("sm_90", (("threads", True),), "threads = True"),
        ("sm_90", (("threads", "2048"),), "threads = '2048'"),
    ],
)
def test_facts_that_cannot_be_are_refused(
    target: str, facts: tuple[tuple[str, object], ...], message: str
) -> None:
    with pytest.raises(UnknownGpuError, match=message):
        gpu_of(target, facts)
