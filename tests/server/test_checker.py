"""The validator process: it refuses by reason, may die, and is replaced."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fuse_cache.proto.limits import GRAPH_LIMITS
from fuse_cache.server.checker import GraphChecker, ValidatorGaveUpError
from fuse_cache.server.errors import InvalidRequestError
from fuse_cache.server.worker import processes
from fuse_cache.server.worker.link import SupervisorLink
from tests.server.harness import FAKES, tiny_graph


@asynccontextmanager
async def checkers(*arguments: str) -> AsyncIterator[tuple[GraphChecker, SupervisorLink]]:
    link = SupervisorLink("fake_builds:build", {**os.environ, "PYTHONPATH": str(FAKES)})
    link.start()
    link.attach()
    checker = GraphChecker(link, extra_arguments=arguments)
    try:
        yield checker, link
    finally:
        checker.close()
        await link.close()


def validator_pid(link: SupervisorLink) -> int:
    for process in processes.tree_of(link.supervisor_pid, processes.process_table()):
        if b"worker.validator" in Path(f"/proc/{process.pid}/cmdline").read_bytes():
            return process.pid
    raise AssertionError("no validator runs")


async def test_a_good_graph_is_described_and_bad_bytes_are_refused_by_reason(tmp_path: Path) -> None:
    good, bad, large = tmp_path / "good", tmp_path / "bad", tmp_path / "large"
    good.write_bytes(tiny_graph())
    bad.write_bytes(b"\xff" * 1000)
    large.write_bytes(tiny_graph() + bytes(GRAPH_LIMITS.size_bytes))
    async with checkers() as (checker, _):
        assert (await checker.check(good)).nodes == 1
        with pytest.raises(InvalidRequestError) as caught:
            await checker.check(bad)
        assert caught.value.reason == "GRAPH_MALFORMED"
        with pytest.raises(InvalidRequestError) as caught:
            await checker.check(large)
        assert caught.value.reason == "GRAPH_TOO_LARGE"
        assert (await checker.check(good)).inputs == 1


async def test_a_validator_that_died_is_replaced_unseen(tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.write_bytes(tiny_graph())
    async with checkers() as (checker, link):
        await checker.start()
        first = validator_pid(link)
        os.kill(first, signal.SIGKILL)
        assert (await checker.check(good)).nodes == 1
        assert validator_pid(link) != first


async def test_a_validator_that_is_silent_is_not_the_graphs_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = tmp_path / "good"
    good.write_bytes(tiny_graph())
    async with checkers() as (checker, link):
        await checker.start()
        os.kill(validator_pid(link), signal.SIGSTOP)
        with monkeypatch.context() as patched:
            patched.setattr("fuse_cache.server.checker.CHECK_S", 0.2)
            with pytest.raises(ValidatorGaveUpError) as caught:
                await checker.check(good)
        assert caught.value.reason == "GRAPH_TOO_LARGE"
        assert (await checker.check(good)).nodes == 1


async def test_a_graph_beyond_the_memory_limit_is_refused_not_fatal(tmp_path: Path) -> None:
    large, good = tmp_path / "large", tmp_path / "good"
    large.write_bytes(bytes(GRAPH_LIMITS.size_bytes))
    good.write_bytes(tiny_graph())
    # Enough to start Python and to read a small graph, not for 8 MiB more.
    async with checkers("--memory-bytes", str(_start_bytes() + (4 << 20))) as (checker, _):
        with pytest.raises(InvalidRequestError) as caught:
            await checker.check(large)
        assert caught.value.reason in ("GRAPH_TOO_LARGE", "GRAPH_MALFORMED")
        assert (await checker.check(good)).nodes == 1


def _start_bytes() -> int:
    """Return the address space of a validator that has done nothing yet."""
    import subprocess
    import sys

    code = (
        "import fuse_cache.server.worker.validator, re;"
        "print(re.search(r'VmPeak:\\s+(\\d+)', open('/proc/self/status').read()).group(1))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout) * 1024
