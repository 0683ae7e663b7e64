"""What is lost, damaged, swapped or reported is a miss, counted and set aside, and can be made again."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import socket
from pathlib import Path

import pytest

from fuse_cache.server.cache.compose import open_store
from fuse_cache.server.cache.disk import DiskTier
from fuse_cache.server.cache.entry_file import encode_header, read_header
from fuse_cache.server.cache.memory import MemoryTier
from fuse_cache.server.cache.store import compose
from fuse_cache.server.cache.tier import Entry, Space
from fuse_cache.server.cache.verified import VerifiedTier, check_content, check_manifest
from tests.server.cache.artifacts import artifact
from tests.server.cache.fakes import FaultyFiles
from tests.server.cache.stores import content_path, manifest_path, publish, publish_lost_in_memory, reopened


class _Endless(bytes):
    def __len__(self) -> int:
        return 1 << 62


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


@pytest.mark.parametrize("part", ["manifest", "content"])
async def test_damage_that_cannot_be_set_aside_is_a_miss_until_it_is_replaced(
    tmp_path: Path, part: str
) -> None:
    """A folder that became read-only, or a disk that fails: the daemon compiles, and serves from memory."""
    files = FaultyFiles()
    checks = {Space.MANIFEST: check_manifest, Space.CONTENT: check_content}
    disk = VerifiedTier(DiskTier(tmp_path, limit_bytes=1 << 30, files=files, reserve_bytes=0), checks)
    store = compose(MemoryTier(limit_bytes=0), disk)
    one = artifact(1)
    await publish_lost_in_memory(store, one)
    path = manifest_path(tmp_path, one) if part == "manifest" else content_path(tmp_path, one)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    files.fail("replace", errno.EROFS)
    files.fail("unlink", errno.EROFS)
    for _ in range(2):
        assert await store.get_content(one.digest) is None or part == "manifest"
        assert await store.get_manifest(one.key) is None
    assert (await store.publish(one.signed_manifest, one.key, one.content, one.meta)).lost
    assert await store.get_manifest(one.key) is None
    files.faults.clear()
    await publish_lost_in_memory(store, one)
    assert await store.get_manifest(one.key) is not None
    assert await store.get_content(one.digest) is not None
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


@pytest.mark.parametrize("what", ["folder", "pipe", "socket", "endless file", "links in a circle"])
@pytest.mark.parametrize("part", ["manifest", "content"])
async def test_what_is_no_file_in_an_entrys_place_is_a_miss_and_made_again(
    tmp_path: Path, part: str, what: str
) -> None:
    """Before: a pipe held a thread, and the daemon's stop, for ever; a folder was an outage without end."""
    store = open_store(tmp_path, memory_bytes=0)
    one = artifact(1)
    await publish_lost_in_memory(store, one)
    path = manifest_path(tmp_path, one) if part == "manifest" else content_path(tmp_path, one)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        if what == "folder":
            path.mkdir()
            (path / "a file").write_text("something")
        elif what == "pipe":
            os.mkfifo(path)
        elif what == "socket":
            here = os.open(path.parent, os.O_RDONLY)
            listener.bind(f"/proc/self/fd/{here}/{path.name}")  # Shorter than a socket's name may be.
            os.close(here)
        else:
            path.symlink_to("/dev/zero" if what == "endless file" else path)
        async with asyncio.timeout(20):
            if part == "content":
                assert await store.get_content(one.digest) is None
            assert await store.get_manifest(one.key) is None
            await publish_lost_in_memory(store, one)
            assert await store.get_manifest(one.key) is not None
            assert await store.get_content(one.digest) is not None
            assert (await store.stats()).lookups["disk"]["unavailable"] == 0
            await store.close()
    assert path.is_file()
    assert not path.is_symlink()


@pytest.mark.parametrize("what", ["folder", "pipe"])
async def test_a_write_replaces_what_is_no_file(tmp_path: Path, what: str) -> None:
    store = open_store(tmp_path, memory_bytes=0)
    one = artifact(1)
    for path in (manifest_path(tmp_path, one), content_path(tmp_path, one)):
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(path) if what == "pipe" else (path / "inner").mkdir(parents=True)
    async with asyncio.timeout(20):
        await publish_lost_in_memory(store, one)
        assert await store.get_content(one.digest) is not None
        await store.close()


async def test_a_header_that_promises_too_much_is_damage_and_takes_no_memory(tmp_path: Path) -> None:
    store = open_store(tmp_path, memory_bytes=0)
    one = artifact(1)
    await publish_lost_in_memory(store, one)
    path = content_path(tmp_path, one)
    with path.open("rb") as file:
        header = read_header(file)
        data = file.read()
    lie = encode_header(Space.CONTENT, one.digest, Entry(_Endless(), header.meta))
    path.write_bytes(lie + data)
    assert await store.get_content(one.digest) is None
    assert (await store.stats()).lookups["disk"]["corrupt"] == 1
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
