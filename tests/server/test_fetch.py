"""Who may read which content, and what asking for others' costs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuse_cache.server.cache.compose import open_store
from fuse_cache.server.cache.memory import MemoryTier
from fuse_cache.server.cache.store import compose
from fuse_cache.server.cache.tier import Space, Stored
from fuse_cache.server.fetch import Grants
from tests.server.cache.artifacts import artifact
from tests.server.cache.fakes import SwitchTier


class _Listed(SwitchTier):
    """Counts what asks it to list everything."""

    listings = 0

    def iterate(self, space: Space) -> Iterator[Stored]:
        self.listings += 1
        return super().iterate(space)


async def test_a_reader_of_unknown_contents_never_makes_the_store_list_itself() -> None:
    slow = _Listed()
    store = compose(MemoryTier(limit_bytes=1 << 20), slow)
    for number in range(20):
        artifact(number).put_into(slow)
    grants = Grants(store)
    for _ in range(50):
        assert not await grants.allow("team", os.urandom(32))
    assert await grants.allow("team", artifact(3).digest)
    assert not await grants.allow("others", artifact(3).digest)
    assert slow.listings == 0
    await store.close()


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_content_is_read_by_the_namespaces_that_name_it(tmp_path: Path, restarted: bool) -> None:
    store = open_store(tmp_path)
    one = artifact(1)
    twin = artifact(2, content=one.content, namespace="second")
    for each in (one, twin):
        await store.publish(each.signed_manifest, each.key, each.content, each.meta)
    if restarted:
        await store.close()
        store = open_store(tmp_path)
    grants = Grants(store)
    assert [await grants.allow(name, one.digest) for name in ("team", "second", "third")] == [
        True,
        True,
        False,
    ]
    await store.remove(twin.key)
    assert not await Grants(store).allow("second", one.digest)
    await store.close()
