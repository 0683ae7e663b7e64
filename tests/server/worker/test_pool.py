"""Worker processes that die, hang, eat memory or fork: the build ends with a reason and leaves nobody."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from fuse_cache.server.worker import processes, protocol
from fuse_cache.server.worker.link import Loading, SupervisorLink
from fuse_cache.server.worker.pool import (
    CompileFailed,
    WorkerDied,
    WorkerOutOfMemory,
    WorkerPool,
    WorkersUnavailable,
    WorkerTimeout,
)

pytestmark = pytest.mark.apart

FAKES = Path(__file__).parents[1] / "fakes"
CHILD_MARK = "fake-build-child"


@asynccontextmanager
async def workers(
    entry: str = "fake_builds:build", *, seconds: float = 60.0, max_bytes: int = 1 << 30
) -> AsyncIterator[tuple[SupervisorLink, WorkerPool]]:
    path = os.pathsep.join(filter(None, (str(FAKES), os.environ.get("PYTHONPATH"))))
    link = SupervisorLink(entry, {**os.environ, "PYTHONPATH": path})
    link.start()
    link.attach()
    try:
        yield link, WorkerPool(link, seconds=seconds, max_bytes=max_bytes, max_content_bytes=1 << 20)
    finally:
        await link.close()


class Runner:
    def __init__(self, folder: Path, pool: WorkerPool) -> None:
        self.folder = folder
        self.pool = pool
        self.events: list[tuple[str, str]] = []
        self.count = 0

    async def run(self, script: str) -> protocol.Built:
        self.count += 1
        folder = self.folder / f"job-{self.count}"
        folder.mkdir()
        (folder / "graph").write_bytes(b"graph")
        job_id = f"{self.folder.name}-{self.count}"
        protocol.write_job_files(folder, job_id=job_id, request=b"script=" + script.encode())
        return await self.pool.run(job_id, folder, lambda stage, detail: self.events.append((stage, detail)))


def children_of_fakes() -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if CHILD_MARK in " ".join(p.info["cmdline"] or ())]


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition never came true"
        await asyncio.sleep(0.02)


def worker_pids(link: SupervisorLink) -> list[int]:
    tree = processes.tree_of(link.supervisor_pid, processes.process_table())
    return [process.pid for process in tree[2:]]  # without the supervisor and its fork server


async def test_a_build_comes_back_with_its_content_and_its_records(tmp_path: Path) -> None:
    async with workers() as (_, pool):
        runner = Runner(tmp_path, pool)
        built = await runner.run("print:hello sleep:0.01")
        assert built.content == b"an artifact made of graph"
        assert built.passes[0]["matches"] == 2
        assert built.near_misses[0]["reason"] == "other_spelling"
        assert (built.nodes, built.compile_seconds) == (7, 1.5)
        assert runner.events == [("inductor", "print:hello"), ("inductor", "sleep:0.01")]
        assert (tmp_path / "job-1" / "log").read_text() == "hello\n"


async def test_a_build_that_refuses_says_why_and_where(tmp_path: Path) -> None:
    async with workers() as (_, pool):
        runner = Runner(tmp_path, pool)
        with pytest.raises(CompileFailed) as caught:
            await runner.run("fail:NOT_CACHEABLE")
        error = caught.value
        assert (error.reason, error.stage, error.deterministic) == ("NOT_CACHEABLE", "inductor", True)
        with pytest.raises(CompileFailed, match="ValueError: the fake compiler raised"):
            await runner.run("raise")


async def test_an_artifact_beyond_the_limit_is_refused_with_the_limit_named(tmp_path: Path) -> None:
    """Case 10: what is too large is refused by our own limit, before any of it is read."""
    async with workers() as (_, pool):
        with pytest.raises(CompileFailed, match="the limit is 1048576") as caught:
            await Runner(tmp_path, pool).run("bytes:2000000")
        assert (caught.value.reason, caught.value.deterministic) == ("NOT_CACHEABLE", True)


@pytest.mark.parametrize("script", ["die", "exit:7", "badjson"])
async def test_a_worker_that_ends_without_a_word_is_told_and_the_next_one_works(
    tmp_path: Path, script: str
) -> None:
    async with workers() as (_, pool):
        runner = Runner(tmp_path, pool)
        with pytest.raises(WorkerDied) as caught:
            await runner.run(f"print:last-words {script}")
        assert not caught.value.deterministic
        assert caught.value.stage == "inductor"
        if script != "badjson":
            assert "last-words" in caught.value.message
        assert (await runner.run("")).nodes == 7


async def test_a_killed_worker_with_children_of_every_kind_leaves_none(tmp_path: Path) -> None:
    """Case 62: the pipe is held open by a child that lives on; waiting for its end would wait for ever."""
    async with workers() as (_, pool):
        began = time.monotonic()
        with pytest.raises(WorkerDied):
            await Runner(tmp_path, pool).run("children sleep:0.2 die")
        assert time.monotonic() - began < 10
        await until(lambda: not children_of_fakes())


async def test_children_that_outlive_a_good_build_are_killed(tmp_path: Path) -> None:
    async with workers() as (_, pool):
        assert (await Runner(tmp_path, pool).run("children")).nodes == 7
        await until(lambda: not children_of_fakes())


async def test_a_build_that_loops_is_stopped_at_its_time_limit(tmp_path: Path) -> None:
    async with workers(seconds=0.5) as (link, pool):
        with pytest.raises(WorkerTimeout, match=r"longer than 0\.5 s") as caught:
            await Runner(tmp_path, pool).run("children loop")
        assert caught.value.reason == "COMPILE_TIMEOUT"
        await until(lambda: not children_of_fakes() and not worker_pids(link))


async def test_a_build_that_eats_memory_is_stopped_at_its_limit(tmp_path: Path) -> None:
    async with workers(max_bytes=200 << 20) as (link, pool):
        with pytest.raises(WorkerOutOfMemory, match="more than 200 MiB") as caught:
            await Runner(tmp_path, pool).run("hog:4096")
        assert caught.value.reason == "OUT_OF_MEMORY"
        await until(lambda: not worker_pids(link))


@pytest.mark.parametrize("victim", ["fork server", "supervisor"])
async def test_a_worker_whose_parent_is_killed_ends_with_all_its_children(
    tmp_path: Path, victim: str
) -> None:
    """Case 62: kill -9 the worker's parent in mid-compile."""
    async with workers() as (link, pool):
        runner = Runner(tmp_path, pool)
        build = asyncio.create_task(runner.run("children sleep:600"))
        await until(lambda: len(children_of_fakes()) == 3)
        supervisor, fork_server = processes.tree_of(link.supervisor_pid, processes.process_table())[:2]
        os.kill((fork_server if victim == "fork server" else supervisor).pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(WorkerDied):
            await build
        assert time.monotonic() - began < 10
        assert (await runner.run("")).nodes == 7
        if victim == "supervisor":
            # This process is no subreaper (the daemon is): the child that left every group is ours to end.
            for child in children_of_fakes():
                child.kill()
        await until(lambda: not children_of_fakes())


async def test_a_supervisor_that_hangs_is_replaced_and_the_build_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It enforces every limit: without it the host would hear for ever that its compilation goes on."""
    monkeypatch.setattr("fuse_cache.server.worker.link.PING_S", 1.0)
    async with workers() as (link, pool):
        runner = Runner(tmp_path, pool)
        build = asyncio.create_task(runner.run("sleep:600"))
        await until(lambda: runner.events)
        os.kill(link.supervisor_pid, signal.SIGSTOP)
        with pytest.raises(WorkerDied, match="its supervisor died"):
            async with asyncio.timeout(30):
                await build
        assert (await runner.run("sleep:0.01")).nodes == 7


@pytest.mark.slow
@pytest.mark.parametrize("script", ["sleep:600", "sleep:1"], ids=["killed at its limit", "built"])
async def test_a_fork_server_that_hangs_is_replaced_and_its_build_ends(tmp_path: Path, script: str) -> None:
    """It is the one that tells of an end, also of one that the supervisor brought about."""
    async with workers(seconds=3.0) as (link, pool):
        runner = Runner(tmp_path, pool)
        build = asyncio.create_task(runner.run(script))
        await until(lambda: runner.events)
        fork_server = processes.tree_of(link.supervisor_pid, processes.process_table())[1]
        os.kill(fork_server.pid, signal.SIGSTOP)
        async with asyncio.timeout(60):
            if script == "sleep:1":
                assert (await build).nodes == 7
            else:
                with pytest.raises(WorkerTimeout):
                    await build
        assert (await runner.run("sleep:0.01")).nodes == 7


async def test_a_cancelled_build_is_killed(tmp_path: Path) -> None:
    async with workers() as (link, pool):
        build = asyncio.create_task(Runner(tmp_path, pool).run("children sleep:600"))
        await until(lambda: len(children_of_fakes()) == 3)
        build.cancel()
        with pytest.raises(asyncio.CancelledError):
            await build
        await until(lambda: not children_of_fakes() and not worker_pids(link))


async def test_a_fork_server_that_cannot_load_is_an_answer_not_a_hang(tmp_path: Path) -> None:
    async with workers("no_such_module:build") as (link, pool):
        with pytest.raises(WorkersUnavailable, match="no_such_module"):
            await Runner(tmp_path, pool).run("")
        assert link.loading is Loading.FAILED


async def test_after_a_reload_running_builds_end_and_new_ones_use_the_new_fork_server(tmp_path: Path) -> None:
    async with workers() as (link, pool):
        runner = Runner(tmp_path, pool)
        gate = tmp_path / "gate"
        old = asyncio.create_task(runner.run(f"wait:{gate}"))
        await until(lambda: runner.events)
        link.reload()
        assert (await runner.run("")).nodes == 7
        assert not old.done()
        gate.touch()
        assert (await old).nodes == 7
        await until(lambda: len(worker_pids(link)) == 0)


async def test_everything_ends_when_the_daemon_is_gone(tmp_path: Path) -> None:
    async with workers() as (link, pool):
        build = asyncio.create_task(Runner(tmp_path, pool).run("children sleep:600"))
        await until(lambda: len(children_of_fakes()) == 3)
        pids = [p.pid for p in processes.tree_of(link.supervisor_pid, processes.process_table())]
    await until(lambda: not children_of_fakes() and not any(psutil.pid_exists(pid) for pid in pids))
    with pytest.raises(WorkerDied):
        await build
