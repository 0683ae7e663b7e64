"""Publishing, removing and forgetting take turns: what was just published is never taken away."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fuse_cache.server.cache.memory import MemoryTier
from fuse_cache.server.cache.store import compose
from fuse_cache.server.cache.tier import Space
from tests.server.cache.artifacts import artifact
from tests.server.cache.fakes import SwitchTier


class _Interrupted(SwitchTier):
    """Runs something between a look for an entry and its answer, once."""

    between: Callable[[], None] | None = None

    def contains(self, space: Space, name: bytes) -> bool:
        there = super().contains(space, name)
        between, self.between = self.between, None
        if between is not None:
            between()
        return there


@pytest.mark.parametrize("same_content", [True, False])
async def test_an_artifact_published_while_its_lost_content_is_noticed_stays(
    same_content: bool,
) -> None:
    slow = _Interrupted()
    store = compose(MemoryTier(limit_bytes=0), slow)
    old = artifact(1)
    new = old if same_content else artifact(1, content=artifact(2).content)
    old.put_into(slow)
    slow.base.delete(Space.CONTENT, old.digest)

    def publish() -> None:
        store.catalogue.publish(new.signed_manifest, new.key, new.content, new.meta)

    slow.between = publish
    found = await store.get_manifest(old.key)
    assert found is not None
    assert found.data == new.signed_manifest
    assert slow.base.get(Space.MANIFEST, new.key) is not None
    await store.close()
