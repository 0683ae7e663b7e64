"""Stores as their tests handle them."""

from __future__ import annotations

from pathlib import Path

from fuse_cache.server.cache.compose import open_store
from fuse_cache.server.cache.store import Store
from tests.server.cache.artifacts import Artifact

FAMILY = b"f" * 32


async def publish(store: Store, *artifacts: Artifact) -> None:
    for one in artifacts:
        published = await store.publish(one.signed_manifest, one.key, one.content, one.meta)
        assert published.lost == ""


async def publish_lost_in_memory(store: Store, one: Artifact) -> None:
    """A memory tier of no size keeps nothing, and says nothing about it."""
    assert (await store.publish(one.signed_manifest, one.key, one.content, one.meta)).lost == ""


async def reopened(store: Store, root: Path) -> Store:
    """A second daemon life on the same folder: nothing in memory."""
    await store.close()
    return open_store(root)


def content_path(root: Path, one: Artifact) -> Path:
    return root / "content" / one.digest.hex()[:2] / one.digest.hex()


def manifest_path(root: Path, one: Artifact) -> Path:
    return root / "manifest" / one.key.hex()[:2] / one.key.hex()
