"""A wider artifact answers for a narrower range."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fuse_cache.server.cache.compose import open_store
from fuse_cache.server.cache.store import Store
from tests.server.cache.artifacts import artifact
from tests.server.cache.stores import FAMILY, publish, publish_lost_in_memory, reopened


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
