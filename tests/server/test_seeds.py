"""A seed that could not be made is tried again, and not with every compilation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import cast

from fuse_cache.server.epoch import package_root, take_epoch, take_stamps
from fuse_cache.server.interpreter import own_interpreter
from fuse_cache.server.seeds import RETRY_S, Seeds
from fuse_cache.server.worker.pool import WorkerDied, WorkerPool
from fuse_cache.server.worker.protocol import Built
from fuse_cache.server.workfolder import WorkFolder


class _Pool:
    def __init__(self) -> None:
        self.runs = 0
        self.fails = True

    async def run(self, job_id: str, folder: Path, on_event: Callable[[str, str], None]) -> Built:
        self.runs += 1
        if self.fails:
            raise WorkerDied("it was killed")
        return Built(content=b"seed")


async def test_seeds_that_no_living_daemon_uses_are_removed(tmp_path: Path) -> None:
    whose = own_interpreter(package_root())
    now = take_epoch(take_stamps(whose), whose, op_modules=())
    before = dataclasses.replace(now, header_sources=b"older")
    base = tmp_path / "seeds"

    def daemon(name: str) -> Seeds:
        pool = _Pool()
        pool.fails = False
        return Seeds(base, WorkFolder(tmp_path / name), cast(WorkerPool, pool), "entry")

    living, dead, ours = daemon("living"), daemon("dead"), daemon("ours")
    in_use = await living.ready(before, "cpu-avx2")
    left = await dead.ready(before, "cpu-avx512")
    next_start = await dead.ready(now, "cpu-avx512")
    own = await ours.ready(now, "cpu-avx2")
    assert None not in (in_use, left, next_start, own)
    await dead.close()
    ours.sweep([now], ("cpu-avx2", "cpu-avx512"))
    assert set(base.iterdir()) == {in_use, next_start, own}, "what is used, and what this daemon may use"
    await living.close()
    ours.sweep([now], ("cpu-avx2", "cpu-avx512"))
    assert set(base.iterdir()) == {next_start, own}
    assert await living.ready(before, "cpu-avx2") is not None
    await ours.close()


async def test_a_seed_that_failed_is_made_later(tmp_path: Path) -> None:
    clock = [100.0]
    pool, work = _Pool(), WorkFolder(tmp_path / "work")
    seeds = Seeds(tmp_path / "seeds", work, cast(WorkerPool, pool), "entry", now_s=lambda: clock[0])
    whose = own_interpreter(package_root())
    epoch = take_epoch(take_stamps(whose), whose, op_modules=())
    assert await seeds.ready(epoch, "cpu-avx2") is None
    pool.fails = False
    assert await seeds.ready(epoch, "cpu-avx2") is None
    assert pool.runs == 1
    clock[0] += RETRY_S
    folder = await seeds.ready(epoch, "cpu-avx2")
    assert folder is not None
    assert folder.is_dir()
    assert await seeds.ready(epoch, "cpu-avx2") == folder
    assert pool.runs == 2
