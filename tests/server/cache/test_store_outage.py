"""A tier that is down, slow or read-only costs what it holds and nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fuse_cache.server.cache.compose import open_store
from fuse_cache.server.cache.memory import MemoryTier
from fuse_cache.server.cache.store import compose
from fuse_cache.server.cache.tier import Space, WriteLostError
from tests.server.cache.artifacts import artifact
from tests.server.cache.fakes import SwitchTier
from tests.server.cache.stores import publish


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
