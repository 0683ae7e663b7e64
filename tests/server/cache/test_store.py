"""The facade: what is a hit, what is a miss, and what the daemon is told about both."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import threading
from collections.abc import Collection
from pathlib import Path
from typing import ClassVar

import pytest

from fuse_cache.server.cache.compose import open_store
from fuse_cache.server.cache.memory import MemoryTier
from fuse_cache.server.cache.store import Store, compose
from fuse_cache.server.cache.tier import Space, WriteLostError
from tests.server.cache.artifacts import Artifact, artifact
from tests.server.cache.fakes import SwitchTier

FAMILY = b"f" * 32


async def publish(store: Store, *artifacts: Artifact) -> None:
    for one in artifacts:
        published = await store.publish(one.signed_manifest, one.key, one.content, one.meta)
        assert published.lost == ""


async def reopened(store: Store, root: Path) -> Store:
    """A second daemon life on the same folder: nothing in memory."""
    await store.close()
    return open_store(root)


def content_path(root: Path, one: Artifact) -> Path:
    return root / "content" / one.digest.hex()[:2] / one.digest.hex()


def manifest_path(root: Path, one: Artifact) -> Path:
    return root / "manifest" / one.key.hex()[:2] / one.key.hex()


async def test_what_is_published_is_a_hit_of_memory_and_after_a_restart_of_disk(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    one = artifact(1)
    assert await store.get_manifest(one.key) is None
    await publish(store, one)
    found = await store.get_manifest(one.key)
    assert found is not None
    assert (found.data, found.tier, found.meta.content) == (one.signed_manifest, "memory", one.digest)
    store = await reopened(store, tmp_path)
    found = await store.get_manifest(one.key)
    assert found is not None
    assert (found.data, found.tier) == (one.signed_manifest, "disk")
    content = await store.get_content(one.digest)
    assert content is not None
    assert content.data == one.content
    found = await store.get_manifest(one.key)
    assert found is not None
    assert found.tier == "memory"
    stats = await store.stats()
    assert stats.lookups["memory"] == {"hit": 1, "miss": 1, "unavailable": 0, "corrupt": 0}
    assert stats.lookups["disk"] == {"hit": 1, "miss": 0, "unavailable": 0, "corrupt": 0}
    assert (stats.entries, stats.status, stats.reason) == (1, "SERVING", "")
    await store.close()


async def test_content_is_stored_once_and_goes_with_its_last_manifest(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    one, twin = artifact(1), artifact(2, content=artifact(1).content)
    await publish(store, one, twin)
    assert len(list(tmp_path.glob("content/*/*"))) == 1
    assert await store.remove(one.key)
    assert await store.get_manifest(one.key) is None
    assert await store.get_manifest(twin.key) is not None
    assert await store.get_content(one.digest) is not None
    assert await store.remove(twin.key)
    assert not list(tmp_path.glob("content/*/*"))
    assert await store.get_content(one.digest) is None
    assert not await store.remove(twin.key)
    await store.close()


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_manifest_whose_content_was_evicted_is_a_miss_once_and_then_repaired(
    tmp_path: Path, restarted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 16: delete only the blob, before lookup."""
    store = open_store(tmp_path, memory_bytes=0)
    one = artifact(1)
    await publish_lost_in_memory(store, one)
    content_path(tmp_path, one).unlink()
    if restarted:
        store = await reopened(store, tmp_path)
    with caplog.at_level(logging.WARNING):
        assert await store.get_manifest(one.key) is None
        assert await store.get_manifest(one.key) is None
    assert [record.message for record in caplog.records].count("content lost") == 1
    assert (await store.stats()).lookups["disk"] == {"hit": 0, "miss": 2, "unavailable": 0, "corrupt": 0}
    await publish_lost_in_memory(store, one)
    assert await store.get_manifest(one.key) is not None
    await store.close()


async def publish_lost_in_memory(store: Store, one: Artifact) -> None:
    """A memory tier of no size keeps nothing, and says nothing about it."""
    assert (await store.publish(one.signed_manifest, one.key, one.content, one.meta)).lost == ""


async def test_a_content_lost_between_lookup_and_fetch_is_a_miss_on_the_next_lookup(tmp_path: Path) -> None:
    """Case 16: between lookup and fetch."""
    store = open_store(tmp_path, memory_bytes=0)
    one = artifact(1)
    await publish_lost_in_memory(store, one)
    assert await store.get_manifest(one.key) is not None
    content_path(tmp_path, one).unlink()
    assert await store.get_content(one.digest) is None
    assert await store.get_manifest(one.key) is None
    await store.close()


async def test_a_hit_of_memory_refreshes_all_parts_that_it_names_below() -> None:
    """Case 16. The disk tier's own reads never happen here: memory answers."""

    class Noting(SwitchTier):
        touched: ClassVar[list[tuple[Space, bytes]]] = []

        def touch(self, space: Space, names: Collection[bytes]) -> None:
            self.touched.extend((space, name) for name in names)

    slow, one = Noting("disk"), artifact(1)
    store = compose(MemoryTier(limit_bytes=1 << 20), slow)
    await publish(store, one)
    slow.touched.clear()
    await store.get_manifest(one.key)
    assert slow.touched == [(Space.MANIFEST, one.key), (Space.CONTENT, one.digest)]
    await store.close()


@pytest.mark.parametrize("part", ["manifest", "content"])
async def test_a_corrupt_file_is_a_miss_counted_and_set_aside(tmp_path: Path, part: str) -> None:
    store = open_store(tmp_path, memory_bytes=0)
    one = artifact(1)
    await publish_lost_in_memory(store, one)
    path = manifest_path(tmp_path, one) if part == "manifest" else content_path(tmp_path, one)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    if part == "content":
        assert await store.get_content(one.digest) is None
    assert await store.get_manifest(one.key) is None
    stats = await store.stats()
    assert stats.lookups["disk"]["corrupt"] == 1
    assert stats.quarantined == 1
    assert not path.exists()
    await publish_lost_in_memory(store, one)
    assert await store.get_manifest(one.key) is not None
    assert await store.get_content(one.digest) is not None
    await store.close()


async def test_a_manifest_that_the_signature_check_refuses_is_not_served(tmp_path: Path) -> None:
    one, other = artifact(1), artifact(2)
    store = open_store(tmp_path)
    await publish(store, one, other)
    await store.close()
    store = open_store(
        tmp_path, check_manifest=lambda key, _: "signer not trusted" if key == one.key else None
    )
    assert await store.get_manifest(one.key) is None
    assert await store.get_manifest(other.key) is not None
    assert (await store.stats()).lookups["disk"]["corrupt"] == 1
    await store.close()


async def test_entries_swapped_under_each_others_key_are_refused(tmp_path: Path) -> None:
    one, other = artifact(1), artifact(2)
    store = open_store(tmp_path)
    await publish(store, one, other)
    store = await reopened(store, tmp_path)
    first, second = manifest_path(tmp_path, one), manifest_path(tmp_path, other)
    swap = tmp_path / "swap"
    shutil.move(first, swap)
    shutil.move(second, first)
    shutil.move(swap, second)
    assert await store.get_manifest(one.key) is None
    assert await store.get_manifest(other.key) is None
    assert (await store.stats()).lookups["disk"]["corrupt"] == 2
    await store.close()


async def test_a_reported_entry_is_set_aside_with_its_content_and_can_be_made_again(tmp_path: Path) -> None:
    """Case 14: an entry that loads but fails on its first call."""
    store = open_store(tmp_path)
    one = artifact(1)
    await publish(store, one)
    assert await store.quarantine(one.key, "failed on first call")
    assert await store.get_manifest(one.key) is None
    assert await store.get_content(one.digest) is None
    assert len(list((tmp_path / "quarantine").iterdir())) == 2
    assert not await store.quarantine(one.key, "again")
    await publish(store, one)
    assert await store.get_manifest(one.key) is not None
    await store.close()


async def test_a_slow_tier_that_is_down_is_an_outage_and_publishing_goes_on_in_memory() -> None:
    slow = SwitchTier("disk")
    store = compose(MemoryTier(limit_bytes=1 << 20), slow)
    one, two = artifact(1), artifact(2)
    await publish(store, one)
    slow.down = True
    published = await store.publish(two.signed_manifest, two.key, two.content, two.meta)
    assert "switched off" in published.lost
    for known in (one, two):
        assert await store.get_manifest(known.key) is not None
        assert await store.get_content(known.digest) is not None
    assert await store.get_manifest(artifact(3).key) is None
    stats = await store.stats()
    assert stats.lookups["disk"] == {"hit": 0, "miss": 0, "unavailable": 1, "corrupt": 0}
    assert {info.key async for info in store.iterate()} == {one.key, two.key}
    slow.down = False
    assert not slow.contains(Space.MANIFEST, two.key)  # never a manifest without its content
    await store.close()


async def test_a_folder_that_cannot_be_used_leaves_memory_at_work_and_says_degraded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = open_store(tmp_path / "file" / "store")
    store.start()
    one = artifact(1)
    published = await store.publish(one.signed_manifest, one.key, one.content, one.meta)
    assert "cannot be used" in published.lost
    assert await store.get_manifest(one.key) is not None
    stats = await store.stats()
    assert (stats.status, stats.entries) == ("DEGRADED", 1)
    assert "cannot be used" in stats.reason
    await store.close()


async def test_a_content_that_is_not_what_the_manifest_names_is_never_stored(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    one = artifact(1)
    with pytest.raises(ValueError, match="digest"):
        await store.publish(one.signed_manifest, one.key, b"something else", one.meta)
    assert await store.get_manifest(one.key) is None
    assert not list(tmp_path.glob("content/*/*"))
    await store.close()


async def test_removing_from_a_read_only_store_is_refused_by_name() -> None:
    class ReadOnly(SwitchTier):
        def delete(self, space: Space, name: bytes) -> bool:
            raise WriteLostError(self.name, "the store folder is read-only")

    slow = ReadOnly("disk")
    store = compose(MemoryTier(limit_bytes=0), slow)
    artifact(1).put_into(slow)
    with pytest.raises(WriteLostError, match="read-only"):
        await store.remove(artifact(1).key)
    await store.close()


async def test_simultaneous_readers_of_one_content_share_one_read() -> None:
    slow = SwitchTier("disk")
    store = compose(MemoryTier(limit_bytes=0), slow)
    one = artifact(1, size_bytes=100_000)
    one.put_into(slow)
    slow.calls = 0
    slow.go_on.clear()
    readers = [asyncio.ensure_future(store.get_content(one.digest)) for _ in range(16)]
    await asyncio.sleep(0)
    readers[0].cancel()
    asyncio.get_running_loop().call_later(0.05, slow.go_on.set)
    found = await asyncio.gather(*readers[1:])
    assert slow.calls == 1
    assert all(one_found is not None and one_found.data == one.content for one_found in found)
    assert len({id(one_found.data) for one_found in found if one_found is not None}) == 1
    assert readers[0].cancelled()
    await store.close()


async def test_a_slow_disk_does_not_hold_up_the_loop_or_memory_hits() -> None:
    slow = SwitchTier("disk")
    store = compose(MemoryTier(limit_bytes=1 << 20), slow)
    one = artifact(1)
    await publish(store, one)
    slow.go_on.clear()
    waiting = [asyncio.ensure_future(store.get_manifest(artifact(number).key)) for number in range(2, 40)]
    await asyncio.sleep(0)
    found = await asyncio.wait_for(store.get_manifest(one.key), 5)
    assert found is not None
    assert found.tier == "memory"
    assert not any(task.done() for task in waiting)
    slow.go_on.set()
    assert await asyncio.gather(*waiting) == [None] * 38
    await store.close()


async def test_hits_and_facts_are_listed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    made = [artifact(number, namespace=f"team-{number % 2}", cost_s=number) for number in range(6)]
    await publish(store, *made)
    await store.get_manifest(made[3].key)
    await store.get_manifest(made[3].key)
    listed = {info.key: info async for info in store.iterate()}
    assert listed.keys() == {one.key for one in made}
    info = listed[made[3].key]
    assert (info.hits, info.facts.namespace, info.facts.compile_seconds) == (2, "team-1", 3.0)
    assert (info.facts.target, info.facts.epoch, info.facts.model) == ("cpu-avx2", "e1", "model-3")
    assert info.content_digest == made[3].digest
    assert info.size_bytes > len(made[3].content)
    await store.close()


def covering(store: Store, lower: int, upper: int, namespace: str = "team", symbol: int = 1) -> list[bytes]:
    return store.covering(namespace, FAMILY, symbol_plus_one=symbol, lower=lower, upper=upper)


async def test_a_range_is_covered_by_the_tightest_artifact_first(tmp_path: Path) -> None:
    ranges = {1: (1, 4096), 2: (1, 2048), 3: (1, 512), 4: (513, 2048)}
    made = {
        number: artifact(number, family=FAMILY, lower=lower, upper=upper, symbol_plus_one=1)
        for number, (lower, upper) in ranges.items()
    }
    store = open_store(tmp_path)
    await publish(store, *made.values())
    await publish(store, artifact(9, family=b"g" * 32, lower=1, upper=9999, symbol_plus_one=1))

    def expect_all(store: Store) -> None:
        assert covering(store, 1, 256) == [made[3].key, made[2].key, made[1].key]
        assert covering(store, 600, 700) == [made[4].key, made[2].key, made[1].key]
        assert covering(store, 1, 4097) == []
        assert covering(store, 1, 256, namespace="others") == []
        assert covering(store, 1, 256, symbol=2) == []

    expect_all(store)
    store = await reopened(store, tmp_path)
    store.start()
    deadline = asyncio.get_running_loop().time() + 20
    while not covering(store, 1, 256) and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.01)
    expect_all(store)
    await store.remove(made[3].key)
    assert covering(store, 1, 256) == [made[2].key, made[1].key]
    await store.close()


async def test_what_a_tier_evicted_is_forgotten_by_the_family_index(tmp_path: Path) -> None:
    store = open_store(tmp_path, memory_bytes=0, disk_bytes=100_000)
    made = [
        artifact(number, size_bytes=10_000, family=FAMILY, lower=1, upper=100 + number, symbol_plus_one=1)
        for number in range(30)
    ]
    for one in made:
        await publish_lost_in_memory(store, one)
        await store.get_manifest(one.key)
    assert len(covering(store, 1, 50)) == 30
    left = {info.key async for info in store.iterate()}
    assert 0 < len(left) < 12
    assert store.catalogue.fill_families() == len(left)
    assert set(covering(store, 1, 50)) == left
    assert {info.key async for info in store.iterate() if info.hits} == left
    await store.close()


async def test_publishing_and_removing_twins_at_once_never_leaves_a_manifest_without_content(
    tmp_path: Path,
) -> None:
    store = open_store(tmp_path, memory_bytes=0)
    twins = [artifact(number, content=b"shared" * 100) for number in range(6)]

    async def churn(one: Artifact) -> None:
        for _ in range(10):
            await publish_lost_in_memory(store, one)
            await store.remove(one.key)
        await publish_lost_in_memory(store, one)

    await asyncio.gather(*(churn(one) for one in twins))
    for one in twins:
        assert await store.get_manifest(one.key) is not None
    assert await store.get_content(twins[0].digest) is not None
    assert len(list(tmp_path.glob("content/*/*"))) == 1
    await store.close()


async def test_closing_waits_for_nothing_but_running_calls_and_ends_all_threads(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.start()
    await publish(store, artifact(1))
    await store.close()
    names = {thread.name for thread in threading.enumerate()}
    assert not {name for name in names if name.startswith("store")}


async def test_opening_makes_nothing_outside_its_folder(tmp_path: Path) -> None:
    before = set(os.listdir(tmp_path))
    store = open_store(tmp_path / "store")
    await publish(store, artifact(1))
    await store.close()
    assert set(os.listdir(tmp_path)) - before == {"store"}
