"""Full disks and folders that may only be read: writes are lost, hits are not."""

from __future__ import annotations

import contextlib
import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuse_cache.server.cache.disk import DiskTier
from fuse_cache.server.cache.tier import Space, TierError, WriteLostError
from tests.server.cache.artifacts import artifact
from tests.server.cache.fakes import FaultyFiles

MIB = 1024 * 1024


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs the right to mount: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    root = tmp_path / "mounted"
    root.mkdir()
    mount("-t", "tmpfs", "-o", "size=24m", "tmpfs", str(root))
    yield root
    subprocess.run(["umount", "-l", str(root)], check=True)


def fill(path: Path, step_bytes: int) -> None:
    """Write into `path` until the disk is full."""
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(step_bytes)):
            pass


def test_a_full_disk_loses_only_the_write_and_deletion_frees_space(small_disk: Path) -> None:
    """Others fill the disk: the store's own cap (1 GiB) never comes into it."""
    tier = DiskTier(small_disk / "store", limit_bytes=1024 * MIB, reserve_bytes=4 * MIB)
    kept = artifact(1, size_bytes=MIB)
    kept.put_into(tier)
    filler = small_disk / "filler"
    fill(filler, MIB // 4)
    big = artifact(2, size_bytes=8 * MIB)
    with pytest.raises(WriteLostError):
        big.put_into(tier)
    assert "full" in tier.health()
    assert tier.get(Space.MANIFEST, big.key) is None
    assert tier.get(Space.CONTENT, big.digest) is None
    assert not list((small_disk / "store" / "temp").iterdir())
    assert tier.usage().lost_writes > 0

    # Deleting works on the full disk, thanks to the reserve, and what it frees can be used.
    small = artifact(3, size_bytes=MIB // 2)
    tier.delete(Space.MANIFEST, kept.key)
    assert not tier.contains(Space.CONTENT, kept.digest)
    small.put_into(tier)
    assert tier.get(Space.MANIFEST, small.key) is not None
    assert tier.health() == ""

    filler.unlink()
    big.put_into(tier)
    found = tier.get(Space.CONTENT, big.digest)
    assert found is not None
    assert found.data == big.content
    assert (small_disk / "store" / "reserve").stat().st_size == 4 * MIB
    tier.maintain()
    files = [path for kind in ("manifest", "content") for path in (small_disk / "store" / kind).rglob("*")]
    assert tier.usage().size_bytes == sum(path.stat().st_size for path in files if path.is_file())
    tier.close()


def test_a_disk_that_is_full_at_start_serves_and_says_so(small_disk: Path) -> None:
    made = artifact(1, size_bytes=MIB)
    first = DiskTier(small_disk / "store", limit_bytes=1024 * MIB, reserve_bytes=0)
    made.put_into(first)
    first.close()
    for path in (small_disk / "store").glob("cache.db*"):
        path.unlink()
    fill(small_disk / "filler", 4096)
    tier = DiskTier(small_disk / "store", limit_bytes=1024 * MIB, reserve_bytes=0)
    assert tier.get(Space.CONTENT, made.digest) is not None
    assert [stored.name for stored in tier.iterate(Space.MANIFEST)] == [made.key]
    with pytest.raises(TierError):
        artifact(2, size_bytes=MIB).put_into(tier)
    assert tier.health() != ""
    (small_disk / "filler").unlink()
    artifact(2).put_into(tier)
    assert tier.health() == ""
    assert {stored.name for stored in tier.iterate(Space.MANIFEST)} == {made.key, artifact(2).key}
    tier.close()


def test_a_store_smaller_than_its_disk_never_sees_the_disk_full(small_disk: Path) -> None:
    tier = DiskTier(small_disk / "store", limit_bytes=8 * MIB, reserve_bytes=4 * MIB)
    for number in range(40):
        artifact(number, size_bytes=MIB).put_into(tier)
    usage = tier.usage()
    assert usage.size_bytes <= 8 * MIB
    assert usage.evictions > 30
    assert usage.lost_writes == 0
    tier.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_in_the_middle_of_a_file_loses_only_that_write(tmp_path: Path, code: int) -> None:
    files = FaultyFiles()
    tier = DiskTier(tmp_path, limit_bytes=64 * MIB, files=files, reserve_bytes=4096)
    old = artifact(1)
    old.put_into(tier)
    files.fail("write", code)
    lost = artifact(2)
    with pytest.raises(WriteLostError, match="full"):
        lost.put_into(tier)
    files.faults.clear()
    assert not list((tmp_path / "temp").iterdir())
    assert not tier.contains(Space.CONTENT, lost.digest)
    lost.put_into(tier)
    assert tier.get(Space.MANIFEST, lost.key) is not None
    tier.close()


def test_room_is_made_once_for_a_write_that_finds_the_disk_full(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = DiskTier(tmp_path, limit_bytes=64 * MIB, files=files, reserve_bytes=4096)
    for number in range(10):
        artifact(number, cost_s=number).put_into(tier)
    files.fail("write", errno.ENOSPC, times=1)
    wanted = artifact(100, size_bytes=1_500, cost_s=50.0)
    wanted.put_into(tier)
    assert tier.get(Space.MANIFEST, wanted.key) is not None
    assert tier.usage().evictions > 0
    assert tier.health() == ""
    tier.close()


def test_a_read_only_folder_is_served_as_hits_only(small_disk: Path) -> None:
    root = small_disk / "store"
    made = [artifact(number) for number in range(3)]
    first = DiskTier(root, limit_bytes=64 * MIB, reserve_bytes=0)
    for one in made:
        one.put_into(first)
    first.close()
    mount("-o", "remount,ro", str(small_disk))
    tier = DiskTier(root, limit_bytes=64 * MIB)
    for one in made:
        found = tier.get(Space.MANIFEST, one.key)
        assert found is not None
        assert found.data == one.signed_manifest
        assert tier.get(Space.CONTENT, one.digest) is not None
    with pytest.raises(WriteLostError, match="read-only"):
        artifact(9).put_into(tier)
    with pytest.raises(WriteLostError, match="read-only"):
        tier.delete(Space.MANIFEST, made[0].key)
    with pytest.raises(WriteLostError, match="read-only"):
        tier.quarantine(Space.MANIFEST, made[0].key)
    assert tier.get(Space.MANIFEST, made[0].key) is not None
    assert tier.get(Space.MANIFEST, artifact(9).key) is None
    assert {stored.name: stored.meta for stored in tier.iterate(Space.MANIFEST)} == {
        one.key: one.meta for one in made
    }
    assert "read-only" in tier.health()
    tier.maintain()
    assert tier.usage().entries == 3
    tier.close()


def test_a_folder_that_turns_read_only_keeps_serving(tmp_path: Path) -> None:
    made, files = artifact(1), FaultyFiles()
    tier = DiskTier(tmp_path, limit_bytes=64 * MIB, reserve_bytes=0, files=files)
    made.put_into(tier)
    for call in ("write", "replace", "unlink"):
        files.fail(call, errno.EROFS)
    with pytest.raises(WriteLostError, match="cannot be written"):
        artifact(2).put_into(tier)
    with pytest.raises(WriteLostError, match="cannot be written"):
        tier.delete(Space.MANIFEST, made.key)
    assert tier.get(Space.MANIFEST, made.key) is not None
    assert tier.health() != ""
    files.faults.clear()
    artifact(2).put_into(tier)
    assert tier.get(Space.MANIFEST, artifact(2).key) is not None
    assert tier.health() == ""
    tier.close()
