"""Several writers on one folder: processes, threads, and somebody who deletes files from outside."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path

import pytest

from fuse_cache.server.cache.check import check
from fuse_cache.server.cache.disk import DiskTier
from fuse_cache.server.cache.tier import CorruptEntryError, Space, TierUnavailableError
from fuse_cache.server.cache.verified import VerifiedTier, check_content, check_manifest
from tests.server.cache.artifacts import artifact

CHECKS = {Space.MANIFEST: check_manifest, Space.CONTENT: check_content}
MIB = 1024 * 1024


def files_of(root: Path, *kinds: str) -> list[Path]:
    """Walk while others delete: os.walk passes over what is gone."""
    return [Path(at, name) for kind in kinds for at, _, names in os.walk(root / kind) for name in names]


def file_bytes(root: Path) -> int:
    total = 0
    for path in files_of(root, "manifest", "content", "temp"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def publish_rounds(root: Path, barrier: Barrier, rounds: int) -> None:
    """One of several processes that store the same artifacts at the same moments."""
    tier = DiskTier(root, limit_bytes=256 * MIB, reserve_bytes=0)
    for number in range(rounds):
        barrier.wait(60)
        artifact(number, size_bytes=100_000).put_into(tier)
    tier.close()


def read_rounds(root: Path, stop: Event, rounds: int) -> None:
    """Poll all the while: nothing, or a whole entry; a manifest only once its content is there."""
    tier = VerifiedTier(DiskTier(root, limit_bytes=256 * MIB, reserve_bytes=0), CHECKS)
    made = [artifact(number, size_bytes=100_000) for number in range(rounds)]
    while not stop.is_set():
        for one in made:
            manifest = tier.get(Space.MANIFEST, one.key)
            content = tier.get(Space.CONTENT, one.digest)
            assert manifest is None or manifest.data == one.signed_manifest
            assert content is None or content.data == one.content
            assert manifest is None or content is not None
    tier.close()


def run_processes(
    *works: tuple[Callable[..., None], tuple[object, ...]],
) -> list[multiprocessing.process.BaseProcess]:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=arguments) for work, arguments in works]
    for process in processes:
        process.start()
    return list(processes)


@pytest.mark.parametrize(("writers", "rounds"), [(4, 10), pytest.param(8, 30, marks=pytest.mark.slow)])
def test_processes_that_publish_the_same_at_once_leave_one_entry_each(
    tmp_path: Path, writers: int, rounds: int
) -> None:
    """Case 13."""
    context = multiprocessing.get_context("spawn")
    barrier, stop = context.Barrier(writers), context.Event()
    (reader,) = run_processes((read_rounds, (tmp_path, stop, rounds)))
    publishers = run_processes(*[(publish_rounds, (tmp_path, barrier, rounds))] * writers)
    for process in publishers:
        process.join(120)
    stop.set()
    reader.join(60)
    assert [process.exitcode for process in (*publishers, reader)] == [0] * (writers + 1)
    tier = DiskTier(tmp_path, limit_bytes=256 * MIB, reserve_bytes=0)
    expected = {artifact(number, size_bytes=100_000).key for number in range(rounds)}
    assert {stored.name for stored in tier.iterate(Space.MANIFEST)} == expected
    assert check(tier, CHECKS, fix=False) == []
    assert not list((tmp_path / "temp").iterdir())
    assert tier.usage().size_bytes == file_bytes(tmp_path)
    tier.close()


@pytest.mark.parametrize("duration_s", [3.0, pytest.param(120.0, marks=pytest.mark.slow)])
def test_a_full_store_under_writers_readers_and_an_outside_deleter_keeps_its_limit(
    tmp_path: Path, duration_s: float
) -> None:
    """Case 65: limit 20 MB, 8 writers of 1 MB entries, readers, an `rm` at random."""
    limit_bytes = 20 * MIB
    tier = VerifiedTier(DiskTier(tmp_path, limit_bytes=limit_bytes, reserve_bytes=0), CHECKS)
    stop = threading.Event()
    failures: list[BaseException] = []
    highest = [0]

    def looped(work: Callable[[random.Random], None], seed: int) -> Callable[[], None]:
        def run() -> None:
            chance = random.Random(seed)
            try:
                while not stop.is_set():
                    work(chance)
            except BaseException as error:
                failures.append(error)

        return run

    def write(chance: random.Random) -> None:
        artifact(chance.randrange(60), size_bytes=MIB, cost_s=chance.random()).put_into(tier)

    def read(chance: random.Random) -> None:
        one = artifact(chance.randrange(60), size_bytes=MIB)
        try:
            found = tier.get(Space.CONTENT, one.digest)
        except (CorruptEntryError, TierUnavailableError) as error:
            raise AssertionError(f"a reader saw {error}") from error
        assert found is None or found.data == one.content

    def delete(chance: random.Random) -> None:
        time.sleep(0.05)
        paths = files_of(tmp_path, "content", "manifest")
        if paths:
            chance.choice(paths).unlink(missing_ok=True)
        if chance.random() < 0.05:
            for shard in range(256):
                with contextlib.suppress(OSError):
                    (tmp_path / "content" / f"{shard:02x}").rmdir()

    def measure(_: random.Random) -> None:
        time.sleep(0.02)
        highest[0] = max(highest[0], file_bytes(tmp_path))

    works = [write] * 8 + [read] * 2 + [delete, measure]
    threads = [threading.Thread(target=looped(work, seed)) for seed, work in enumerate(works)]
    for thread in threads:
        thread.start()
    time.sleep(duration_s)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    # Each put takes its room before it writes, so that even eight writers at once stay under the cap. What is
    # being renamed may be seen under both names by the walk above: one entry.
    assert 0 < highest[0] <= limit_bytes + MIB + 4096
    assert tier.usage().evictions > 0
    tier.maintain()
    assert tier.usage().size_bytes == file_bytes(tmp_path) <= limit_bytes
    assert not list((tmp_path / "temp").iterdir())
    tier.close()


def test_a_dear_entry_outlives_a_stream_of_cheap_ones(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, limit_bytes=2 * MIB, reserve_bytes=0)
    dear = artifact(1, size_bytes=100_000, cost_s=900.0)
    dear.put_into(tier)
    for number in range(100, 160):
        artifact(number, size_bytes=100_000, cost_s=0.5).put_into(tier)
    assert tier.usage().evictions > 0
    assert tier.get(Space.MANIFEST, dear.key) is not None
    assert tier.get(Space.CONTENT, dear.digest) is not None
    tier.close()


def test_what_is_used_outlives_what_is_not(tmp_path: Path) -> None:
    clock = [1_700_000_000.0]
    tier = DiskTier(tmp_path, limit_bytes=2 * MIB, reserve_bytes=0, now_s=lambda: clock[0])
    made = [artifact(number, size_bytes=100_000) for number in range(18)]
    for one in made:
        one.put_into(tier)
    clock[0] = time.time() + 10 * 86_400
    tier.touch(Space.CONTENT, [one.digest for one in made[:9]])
    for number in range(100, 109):
        artifact(number, size_bytes=100_000).put_into(tier)
    assert all(tier.contains(Space.MANIFEST, one.key) for one in made[:9])
    assert not any(tier.contains(Space.MANIFEST, one.key) for one in made[9:15])
    tier.close()


def test_an_evicted_content_takes_its_manifests_along(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, limit_bytes=300_000, reserve_bytes=0)
    shared = artifact(1, size_bytes=100_000, cost_s=0.1)
    twin = artifact(2, content=shared.content, cost_s=0.1)
    shared.put_into(tier)
    twin.put_into(tier)
    for number in range(10, 14):
        artifact(number, size_bytes=100_000, cost_s=50.0).put_into(tier)
    assert not tier.contains(Space.CONTENT, shared.digest)
    assert not tier.contains(Space.MANIFEST, shared.key)
    assert not tier.contains(Space.MANIFEST, twin.key)
    assert check(tier, CHECKS, fix=False) == []
    tier.close()


def test_half_a_publish_is_not_evicted(tmp_path: Path) -> None:
    """Its manifest is on the way; evicting the content now would make a manifest without one."""
    tier = DiskTier(tmp_path, limit_bytes=500_000, reserve_bytes=0)
    half = artifact(1, size_bytes=100_000, cost_s=0.0)
    tier.put(Space.CONTENT, half.digest, half.content_entry)
    for number in range(10, 30):
        artifact(number, size_bytes=100_000, cost_s=100.0).put_into(tier)
    assert tier.contains(Space.CONTENT, half.digest)
    tier.close()


FORKING = """
import os, sys
from pathlib import Path
from fuse_cache.server.cache.disk import DiskTier
from fuse_cache.server.cache.tier import Space
from tests.server.cache.artifacts import artifact
tier = DiskTier(Path(sys.argv[1]), limit_bytes=1 << 20, reserve_bytes=0)
artifact(1).put_into(tier)
child = os.fork()
if child == 0:
    artifact(2).put_into(tier)
    os._exit(0 if tier.get(Space.MANIFEST, artifact(1).key) is not None else 2)
assert os.waitpid(child, 0)[1] == 0
assert tier.get(Space.MANIFEST, artifact(2).key) is not None
assert tier.usage().entries == 2
"""


def test_a_forked_child_can_use_the_tier_it_inherited(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run([sys.executable, "-c", FORKING, str(tmp_path)], check=True, env=environment, timeout=60)
