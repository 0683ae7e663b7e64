"""What goes inline is what is at hand or small: nothing is read from disk to be thrown away."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuse_cache.server.cache.compose import open_store
from fuse_cache.server.lookup import inline_content
from tests.server.cache.artifacts import artifact

SIZE = 4_000


@pytest.mark.parametrize(("limit", "read"), [(0, 0), (SIZE - 1, 0), (SIZE, 1)])
async def test_content_that_only_the_disk_has_is_read_only_if_it_fits(
    tmp_path: Path, limit: int, read: int
) -> None:
    store = open_store(tmp_path, memory_bytes=SIZE)  # Room for the manifest, not for the content.
    one = artifact(1, size_bytes=SIZE)
    await store.publish(one.signed_manifest, one.key, one.content, one.meta)
    found = await store.get_manifest(one.key)
    assert found is not None
    assert found.tier == "memory"
    assert await inline_content(store, found, limit) == (one.content if read else b"")
    assert store.catalogue._measured["disk"]._seen.content.hit == read
    await store.close()
