"""The facade: what is a hit, what is a miss, and what is kept together."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Collection
from pathlib import Path
from typing import ClassVar

import pytest

from fuse_cache.server.cache.compose import open_store
from fuse_cache.server.cache.memory import MemoryTier
from fuse_cache.server.cache.store import compose
from fuse_cache.server.cache.tier import Space
from tests.server.cache.artifacts import Artifact, artifact
from tests.server.cache.fakes import SwitchTier
from tests.server.cache.stores import publish, publish_lost_in_memory, reopened


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


async def test_a_content_that_is_not_what_the_manifest_names_is_never_stored(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    one = artifact(1)
    with pytest.raises(ValueError, match="digest"):
        await store.publish(one.signed_manifest, one.key, b"something else", one.meta)
    assert await store.get_manifest(one.key) is None
    assert not list(tmp_path.glob("content/*/*"))
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
