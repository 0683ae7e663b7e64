"""`fuse-cache check [--fix]`: everything that can be wrong with a store is named, and put right."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from fuse_cache.server.cache.check import Problem, check
from fuse_cache.server.cache.compose import open_store
from fuse_cache.server.cache.disk import DiskTier
from fuse_cache.server.cache.tier import Space
from fuse_cache.server.cache.verified import check_content, check_manifest
from tests.server.cache.artifacts import artifact

CHECKS = {Space.MANIFEST: check_manifest, Space.CONTENT: check_content}
LATER_S = 10_000.0


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path, limit_bytes=1 << 26, reserve_bytes=0, now_s=lambda: time.time() + LATER_S)
    for number in range(6):
        artifact(number).put_into(tier)
    yield tier
    tier.close()


def kinds(problems: Iterable[Problem]) -> list[str]:
    return sorted(problem.kind for problem in problems)


def run(tier: DiskTier, *, fix: bool) -> list[Problem]:
    return check(tier, CHECKS, fix=fix, now_s=time.time() + LATER_S)


def test_a_sound_store_has_no_problems(tier: DiskTier) -> None:
    assert run(tier, fix=False) == []


def test_each_kind_of_problem_is_named_and_put_right(tier: DiskTier, tmp_path: Path) -> None:
    def path(space: Space, number: int) -> Path:
        one = artifact(number)
        return Path(tier.folder.path(space, one.key if space is Space.MANIFEST else one.digest))

    # 0: damaged content (its manifest then dangles); 1: content gone; 2: manifest gone (its content is
    # nobody's)
    damaged = path(Space.CONTENT, 0)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    path(Space.CONTENT, 1).unlink()
    path(Space.MANIFEST, 2).unlink()
    # 3: no row; 4: a row with another size
    connection = sqlite3.connect(tmp_path / "cache.db")
    connection.execute("DELETE FROM Cache WHERE key = ?", (b"m" + artifact(3).key,))
    connection.execute("UPDATE Cache SET size = 5 WHERE key = ?", (b"c" + artifact(4).digest,))
    connection.commit()
    connection.close()
    (tmp_path / "temp" / "left").write_bytes(b"half")
    (path(Space.CONTENT, 5).parent / "notes.txt").write_text("not ours")

    expected = [
        "damaged",
        "dangling",
        "dangling",
        "lost",
        "lost",
        "size",
        "stranger",
        "temp",
        "unindexed",
        "unnamed",
    ]
    found = run(tier, fix=False)
    assert kinds(found) == expected
    assert not any(problem.fixed for problem in found)
    assert run(tier, fix=False) == found  # looking changes nothing

    fixed = run(tier, fix=True)
    assert kinds(problem for problem in fixed if not problem.fixed) == ["stranger"]
    left = run(tier, fix=True)
    # The stranger is not ours to delete.
    assert kinds(left) == ["stranger"]
    assert {stored.name for stored in tier.iterate(Space.MANIFEST)} == {
        artifact(number).key for number in (3, 4, 5)
    }
    assert {stored.name for stored in tier.iterate(Space.CONTENT)} == {
        artifact(number).digest for number in (3, 4, 5)
    }
    assert len(list((tmp_path / "quarantine").iterdir())) == 1
    files = [
        entry for kind in ("manifest", "content") for entry in (tmp_path / kind).rglob("*") if entry.is_file()
    ]
    sizes = sum(entry.stat().st_size for entry in files if entry.name != "notes.txt")
    assert tier.usage().size_bytes == sizes


def test_half_of_a_publish_is_no_problem_while_it_is_young(tmp_path: Path) -> None:
    tier, half = DiskTier(tmp_path, limit_bytes=1 << 26, reserve_bytes=0), artifact(50)
    tier.put(Space.CONTENT, half.digest, half.content_entry)
    assert check(tier, CHECKS, fix=True) == []
    assert tier.contains(Space.CONTENT, half.digest)
    tier.close()


async def test_the_facade_checks_while_it_serves(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    one = artifact(1)
    await store.publish(one.signed_manifest, one.key, one.content, one.meta)
    assert await store.check(fix=False) == []
    path = tmp_path / "content" / one.digest.hex()[:2] / one.digest.hex()
    path.write_bytes(b"noise")
    problems = await store.check(fix=True)
    assert [(problem.kind, problem.fixed) for problem in problems] == [("damaged", True), ("dangling", True)]
    assert await store.check(fix=True) == []
    await store.close()
