"""The index can be damaged, deleted or held by another: files are the truth."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fuse_cache.server.cache.disk import DiskTier
from fuse_cache.server.cache.tier import Space, TierError
from tests.server.cache.artifacts import Artifact, artifact

ENTRIES = 12


def open_disk(root: Path) -> DiskTier:
    return DiskTier(root, limit_bytes=1 << 26, reserve_bytes=0)


@pytest.fixture(scope="module")
def made() -> list[Artifact]:
    return [artifact(number, cost_s=number) for number in range(ENTRIES)]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, made: list[Artifact]) -> Path:
    root = tmp_path_factory.mktemp("template")
    tier = open_disk(root)
    for one in made:
        one.put_into(tier)
    tier.close()
    return root


@pytest.fixture
def store(template: Path, tmp_path: Path) -> Path:
    return shutil.copytree(template, tmp_path / "store")


def assert_whole(root: Path, made: list[Artifact]) -> int:
    """All entries are served at once and listed after maintenance, and work goes on. Returns the rebuilds."""
    tier = open_disk(root)
    for one in made:
        found = tier.get(Space.MANIFEST, one.key)
        assert found is not None
        assert found.data == one.signed_manifest
    extra = artifact(1_000)
    extra.put_into(tier)
    tier.maintain()
    listed = {stored.name: stored.meta for stored in tier.iterate(Space.MANIFEST)}
    assert listed == {one.key: one.meta for one in [*made, extra]}
    files = [path for kind in ("manifest", "content") for path in (root / kind).rglob("*") if path.is_file()]
    assert tier.usage().size_bytes == sum(path.stat().st_size for path in files)
    assert tier.usage().entries == len(made) + 1
    tier.delete(Space.MANIFEST, extra.key)
    assert not tier.contains(Space.CONTENT, extra.digest)
    assert tier.health() == ""
    rebuilds = tier.usage().index_rebuilds
    tier.close()
    return rebuilds


def flips(store: Path, made: list[Artifact], count: int) -> int:
    """Flip one bit at `count` places, each in a fresh database; return how many led to a rebuild."""
    good = (store / "cache.db").read_bytes()
    chance = random.Random(5)
    rebuilt = 0
    for _ in range(count):
        bad = bytearray(good)
        at = chance.randrange(len(bad))
        bad[at] ^= 1 << chance.randrange(8)
        for path in store.glob("cache.db*"):
            path.unlink()
        (store / "cache.db").write_bytes(bad)
        try:
            rebuilt += assert_whole(store, made)
        except BaseException as error:
            error.add_note(f"bit flipped in byte {at}")
            raise
    return rebuilt


def test_bit_flips_in_the_database_lose_nothing(store: Path, made: list[Artifact]) -> None:
    flips(store, made, 25)


@pytest.mark.slow
def test_many_bit_flips_in_the_database_lose_nothing(store: Path, made: list[Artifact]) -> None:
    assert flips(store, made, 300) > 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"SQLite format 3\0" + bytes(5_000)),
        lambda path: path.write_bytes(random.Random(1).randbytes(20_000)),
        lambda path: os.truncate(path, 4_096),
        lambda path: os.truncate(path, path.stat().st_size // 2),
    ],
    ids=["deleted", "empty", "zeros", "noise", "one page", "half"],
)
def test_a_ruined_database_loses_nothing(
    store: Path, made: list[Artifact], damage: Callable[[Path], None]
) -> None:
    damage(store / "cache.db")
    assert_whole(store, made)


def test_a_database_of_other_tables_loses_nothing(store: Path, made: list[Artifact]) -> None:
    connection = sqlite3.connect(store / "cache.db")
    connection.executescript("DROP TABLE Cache; CREATE TABLE Cache (other INTEGER); DELETE FROM Settings;")
    connection.close()
    assert assert_whole(store, made) == 1


def test_a_total_that_is_wrong_is_set_right(store: Path, made: list[Artifact]) -> None:
    connection = sqlite3.connect(store / "cache.db")
    connection.execute("UPDATE Settings SET value = 123456789 WHERE key = 'size'")
    connection.commit()
    connection.close()
    assert assert_whole(store, made) == 0


def test_sizes_below_zero_are_damage_and_the_index_is_rebuilt(store: Path, made: list[Artifact]) -> None:
    """Before: the daemon's stats failed, and nothing was ever evicted."""
    with sqlite3.connect(store / "cache.db") as database:
        database.execute("UPDATE Cache SET size = -1")
    database.close()
    tier = open_disk(store)
    assert tier.usage().size_bytes >= 0
    assert tier.usage().index_rebuilds == 1
    tier.close()
    assert_whole(store, made)


def test_rows_and_files_that_lost_each_other_are_reconciled(store: Path, made: list[Artifact]) -> None:
    connection = sqlite3.connect(store / "cache.db")
    connection.execute("DELETE FROM Cache WHERE key = ?", (b"m" + made[0].key,))
    connection.execute("DELETE FROM Cache WHERE key = ?", (b"c" + made[0].digest,))
    connection.commit()
    connection.close()
    tier = open_disk(store)
    os.unlink(tier.folder.path(Space.MANIFEST, made[1].key))
    assert tier.get(Space.MANIFEST, made[1].key) is None
    tier.maintain()
    assert {stored.name for stored in tier.iterate(Space.MANIFEST)} == {one.key for one in made} - {
        made[1].key
    }
    assert tier.usage().entries == ENTRIES - 1
    tier.close()


def test_a_manifest_whose_content_is_gone_is_swept(store: Path, made: list[Artifact]) -> None:
    tier = DiskTier(store, limit_bytes=1 << 26, reserve_bytes=0, now_s=lambda: time.time() + 120)
    os.unlink(tier.folder.path(Space.CONTENT, made[0].digest))
    tier.maintain()
    assert not tier.contains(Space.MANIFEST, made[0].key)
    assert tier.usage().entries == ENTRIES - 1
    tier.close()


def test_a_content_that_no_manifest_names_is_swept_after_an_hour(store: Path, made: list[Artifact]) -> None:
    half = artifact(500)
    tier = open_disk(store)
    tier.put(Space.CONTENT, half.digest, half.content_entry)
    tier.maintain()
    assert tier.contains(Space.CONTENT, half.digest)
    tier.close()
    later = DiskTier(store, limit_bytes=1 << 26, reserve_bytes=0, now_s=lambda: time.time() + 4_000)
    later.maintain()
    assert not later.contains(Space.CONTENT, half.digest)
    assert later.usage().entries == ENTRIES
    later.close()


class Bomb:
    """Unpickling this makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


def test_nothing_in_the_database_is_ever_unpickled(store: Path, made: list[Artifact], tmp_path: Path) -> None:
    """diskcache's own Disk would load keys and values of such rows with pickle."""
    marker = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(str(marker)))
    connection = sqlite3.connect(store / "cache.db")
    insert = "INSERT INTO Cache (key, raw, store_time, tag, size, mode, value) VALUES (?, ?, 0, ?, 1, 4, ?)"
    connection.execute(insert, (bomb, 0, bomb, bomb))
    connection.execute(insert, (b"m" + bytes(32), 0, bomb, bomb))
    connection.execute(insert, (b"m" + bytes([1]) * 32, 1, bomb, bomb))
    connection.execute("INSERT OR REPLACE INTO Settings VALUES ('disk_pickle_protocol', ?)", (bomb,))
    connection.commit()
    connection.close()
    assert_whole(store, made)
    assert not marker.exists()


def test_a_database_that_another_holds_costs_no_hit(store: Path, made: list[Artifact]) -> None:
    tier = open_disk(store)
    holder = sqlite3.connect(store / "cache.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    started_s = time.monotonic()
    assert tier.get(Space.MANIFEST, made[0].key) is not None
    assert time.monotonic() - started_s < 1.0
    with pytest.raises(TierError):
        artifact(77).put_into(tier)
    assert "index" in tier.health()
    holder.execute("ROLLBACK")
    holder.close()
    artifact(77).put_into(tier)
    assert tier.health() == ""
    assert tier.usage().index_rebuilds == 0
    tier.close()


def test_when_one_process_rebuilds_the_other_moves_to_the_new_index(
    store: Path, made: list[Artifact]
) -> None:
    first, second = open_disk(store), open_disk(store)
    first.guarded.index.database.rebuild()
    artifact(50).put_into(second)
    first.maintain()
    expected = {one.key for one in [*made, artifact(50)]}
    assert {stored.name for stored in first.iterate(Space.MANIFEST)} == expected
    assert {stored.name for stored in second.iterate(Space.MANIFEST)} == expected
    first.close()
    second.close()
