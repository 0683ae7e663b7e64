"""The contract of `Tier`, run against every tier and every wrapper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fuse_cache.server.cache.bounded import BoundedTier
from fuse_cache.server.cache.disk import DiskTier
from fuse_cache.server.cache.layered import LayeredTier
from fuse_cache.server.cache.measured import MeasuredTier
from fuse_cache.server.cache.memory import MemoryTier
from fuse_cache.server.cache.tier import Space, Tier
from fuse_cache.server.cache.verified import VerifiedTier, check_content, check_manifest
from tests.server.cache.contract import TierContract

LIMIT_BYTES = 64 * 1024 * 1024
CHECKS = {Space.MANIFEST: check_manifest, Space.CONTENT: check_content}


def disk(root: Path) -> DiskTier:
    return DiskTier(root, limit_bytes=LIMIT_BYTES, reserve_bytes=4096)


class TestMemory(TierContract):
    @pytest.fixture
    def tier(self) -> Tier:
        return MemoryTier(limit_bytes=LIMIT_BYTES)


class TestDisk(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = disk(tmp_path)
        yield tier
        tier.close()


class TestDiskAsTheDaemonComposesIt(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = MeasuredTier(BoundedTier(VerifiedTier(disk(tmp_path), CHECKS)))
        yield tier
        tier.close()


class TestMemoryOverDisk(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = LayeredTier(MemoryTier(limit_bytes=LIMIT_BYTES), disk(tmp_path))
        yield tier
        tier.close()


class TestATinyMemoryOverDisk(TierContract):
    """Nearly nothing fits above, so that almost every answer comes from below."""

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = LayeredTier(MemoryTier(limit_bytes=2_000), disk(tmp_path))
        yield tier
        tier.close()


class TestThreeLevels(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        below = LayeredTier(disk(tmp_path / "near"), disk(tmp_path / "far"))
        tier = LayeredTier(MemoryTier(limit_bytes=2_000), below)
        yield tier
        tier.close()
