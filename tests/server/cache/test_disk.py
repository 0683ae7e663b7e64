"""The disk tier: what survives a restart, damage of files, faults of file calls."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fuse_cache.server.cache.disk import DiskTier
from fuse_cache.server.cache.filesystem import StoreFolderError, is_network, refuse_network, type_of_mount
from fuse_cache.server.cache.tier import (
    CorruptEntryError,
    Space,
    TierError,
    TierUnavailableError,
    WriteLostError,
)
from fuse_cache.server.cache.verified import VerifiedTier, check_content, check_manifest
from tests.server.cache.artifacts import Artifact, artifact
from tests.server.cache.fakes import FaultyFiles

CHECKS = {Space.MANIFEST: check_manifest, Space.CONTENT: check_content}
LIMIT_BYTES = 1 << 26
REPOSITORY = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONSAFEPATH": "1"}


def open_disk(root: Path, limit_bytes: int = LIMIT_BYTES, files: FaultyFiles | None = None) -> DiskTier:
    return DiskTier(root, limit_bytes=limit_bytes, reserve_bytes=64 * 1024, files=files)


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def tier(tmp_path: Path, files: FaultyFiles) -> Iterator[DiskTier]:
    tier = open_disk(tmp_path / "store", files=files)
    yield tier
    files.faults.clear()
    tier.close()


def file_of(tier: DiskTier, made: Artifact, space: Space) -> Path:
    return Path(tier.folder.path(space, made.key if space is Space.MANIFEST else made.digest))


def all_files(root: Path) -> list[Path]:
    return [
        path
        for kind in ("manifest", "content", "temp")
        for path in (root / kind).rglob("*")
        if path.is_file()
    ]


def test_entries_survive_a_restart(tmp_path: Path) -> None:
    made = [artifact(number, cost_s=number) for number in range(5)]
    first = open_disk(tmp_path)
    for one in made:
        one.put_into(first)
    first.close()
    second = open_disk(tmp_path)
    for one in made:
        found = second.get(Space.MANIFEST, one.key)
        assert found is not None
        assert (found.data, found.meta) == (one.signed_manifest, one.meta)
    assert second.usage().entries == 5
    assert second.usage().size_bytes == sum(path.stat().st_size for path in all_files(tmp_path))
    second.close()


def test_the_folder_is_for_its_owner_only(tmp_path: Path) -> None:
    open_disk(tmp_path / "a" / "store").close()
    assert (tmp_path / "a" / "store").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("damage", ["flip", "cut", "extend", "other", "empty", "garbage"])
@pytest.mark.parametrize("space", list(Space))
def test_a_damaged_file_is_told_apart_and_set_aside_once(tmp_path: Path, space: Space, damage: str) -> None:
    tier = open_disk(tmp_path)
    verified = VerifiedTier(tier, CHECKS)
    made, other = artifact(1), artifact(2)
    made.put_into(tier)
    other.put_into(tier)
    path = file_of(tier, made, space)
    data = path.read_bytes()
    path.write_bytes(
        {
            "flip": data[:-10] + bytes([data[-10] ^ 1]) + data[-9:],
            "cut": data[:-1],
            "extend": data + b"\0",
            "other": file_of(tier, other, space).read_bytes(),
            "empty": b"",
            "garbage": random.Random(1).randbytes(len(data)),
        }[damage]
    )
    name = made.key if space is Space.MANIFEST else made.digest
    with pytest.raises(CorruptEntryError):
        verified.get(space, name)
    assert verified.get(space, name) is None
    assert tier.usage().quarantined == 1
    assert len(list((tmp_path / "quarantine").iterdir())) == 1
    made.put_into(tier)
    found = verified.get(space, name)
    assert found is not None
    found_other = verified.get(Space.CONTENT, other.digest)
    assert found_other is not None
    assert found_other.data == other.content
    tier.close()


def test_two_whole_manifests_under_each_others_names_are_refused(tier: DiskTier) -> None:
    """Each file says which entry it is; even one written anew for the wrong key is found out by what it
    holds.
    """
    one, two = artifact(1), artifact(2)
    one.put_into(tier)
    two.put_into(tier)
    tier.put(Space.MANIFEST, one.key, two.manifest_entry)
    with pytest.raises(CorruptEntryError, match="another key"):
        VerifiedTier(tier, CHECKS).get(Space.MANIFEST, one.key)


def test_the_quarantine_stays_small(tier: DiskTier, tmp_path: Path) -> None:
    for number in range(40):
        made = artifact(number)
        tier.put(Space.CONTENT, made.digest, made.content_entry)
        tier.quarantine(Space.CONTENT, made.digest)
    assert len(list((tmp_path / "store" / "quarantine").iterdir())) == 32
    assert tier.usage().quarantined == 40


def test_reading_needs_no_index_at_all(tier: DiskTier, tmp_path: Path) -> None:
    made = artifact(1)
    made.put_into(tier)
    for path in (tmp_path / "store").glob("cache.db*"):
        path.unlink()
    found = tier.get(Space.MANIFEST, made.key)
    assert found is not None
    assert found.data == made.signed_manifest


def test_a_folder_that_is_wiped_is_empty_and_made_again(tier: DiskTier, tmp_path: Path) -> None:
    """Case 65: a cleaner of temporary files takes the folder away underneath."""
    first, second = artifact(1), artifact(2)
    first.put_into(tier)
    shutil.rmtree(tmp_path / "store")
    assert tier.get(Space.MANIFEST, first.key) is None
    second.put_into(tier)
    assert tier.get(Space.MANIFEST, second.key) is not None
    assert {stored.name for stored in tier.iterate(Space.MANIFEST)} == {second.key}
    assert tier.health() == ""


@pytest.mark.parametrize("kind", ["temp", "manifest", "content", "quarantine"])
def test_a_subfolder_that_is_wiped_is_made_again(tier: DiskTier, tmp_path: Path, kind: str) -> None:
    artifact(1).put_into(tier)
    shutil.rmtree(tmp_path / "store" / kind, ignore_errors=True)
    made = artifact(2)
    made.put_into(tier)
    assert tier.get(Space.MANIFEST, made.key) is not None
    assert tier.quarantine(Space.MANIFEST, made.key)


def test_a_fresh_file_that_is_not_visible_at_once_is_still_found(tier: DiskTier, files: FaultyFiles) -> None:
    """Case 64: after a rename, the first open says ENOENT."""
    made = artifact(1)
    made.put_into(tier)
    files.fail("open_read", errno.ENOENT, times=1)
    assert tier.get(Space.MANIFEST, made.key) is not None
    files.fail("open_read", errno.ENOENT, times=2)
    assert tier.get(Space.MANIFEST, made.key) is None


@pytest.mark.parametrize("code", [errno.EXDEV, errno.ENOTSUP])
def test_a_mount_without_renames_is_refused_at_start(tmp_path: Path, code: int) -> None:
    files = FaultyFiles()
    files.fail("replace", code)
    with pytest.raises(StoreFolderError, match="cannot be renamed"):
        open_disk(tmp_path, files=files)
    assert not all_files(tmp_path)


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EBUSY, errno.EIO])
def test_a_failed_rename_loses_the_write_and_leaves_nothing(
    tier: DiskTier, files: FaultyFiles, tmp_path: Path, code: int
) -> None:
    made = artifact(1)
    files.fail("replace", code)
    with pytest.raises(TierError):
        tier.put(Space.CONTENT, made.digest, made.content_entry)
    files.faults.clear()
    assert not all_files(tmp_path / "store")
    assert tier.get(Space.CONTENT, made.digest) is None
    assert tier.usage().size_bytes == 0


def test_an_unreadable_disk_is_an_outage_and_no_miss(tier: DiskTier, files: FaultyFiles) -> None:
    made = artifact(1)
    made.put_into(tier)
    files.fail("open_read", errno.EIO)
    with pytest.raises(TierUnavailableError):
        tier.get(Space.MANIFEST, made.key)
    files.faults.clear()
    assert tier.get(Space.MANIFEST, made.key) is not None


def test_a_folder_that_cannot_be_made_is_an_outage_that_ends(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    clock = [0.0]
    tier = DiskTier(blocker / "store", limit_bytes=LIMIT_BYTES, monotonic_s=lambda: clock[0])
    made = artifact(1)
    with pytest.raises(TierUnavailableError):
        tier.get(Space.MANIFEST, made.key)
    with pytest.raises(TierUnavailableError):
        made.put_into(tier)
    assert "cannot be used" in tier.health()
    assert tier.usage().entries == 0
    tier.maintain()
    blocker.unlink()
    clock[0] = 60.0
    made.put_into(tier)
    assert tier.get(Space.MANIFEST, made.key) is not None
    assert tier.health() == ""
    tier.close()


def test_a_store_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "FORMAT").write_text("fuse-cache store 2\n")
    with pytest.raises(StoreFolderError, match="another format"):
        open_disk(tmp_path)


@pytest.mark.parametrize("torn", [b"", b"fuse-", bytes(64), b"fuse-cache store 1", None])
def test_a_torn_format_file_is_written_anew(tmp_path: Path, torn: bytes | None) -> None:
    """As a power cut leaves it. None: a folder in its place."""
    made = artifact(1)
    tier = open_disk(tmp_path)
    made.put_into(tier)
    tier.close()
    marker = tmp_path / "FORMAT"
    whole = marker.read_bytes()
    marker.unlink()
    if torn is None:
        marker.mkdir()
    else:
        marker.write_bytes(torn)
    tier = open_disk(tmp_path)
    assert tier.get(Space.MANIFEST, made.key) is not None
    assert marker.read_bytes() == whole
    tier.close()


def test_entries_of_another_format_are_left_alone_although_the_format_file_is_torn(tmp_path: Path) -> None:
    made = artifact(1)
    tier = open_disk(tmp_path)
    made.put_into(tier)
    tier.close()
    (tmp_path / "FORMAT").write_bytes(b"")
    entries = [path for path in tmp_path.rglob("*") if path.parent.parent.name in ("manifest", "content")]
    for path in entries:
        path.write_bytes(b"fcentry2" + path.read_bytes()[8:])
    with pytest.raises(StoreFolderError, match=r"cannot read, and .* give --store another"):
        open_disk(tmp_path)
    assert all(path.exists() for path in entries)
    assert len(entries) == 2


def test_network_file_systems_are_refused_by_type(tmp_path: Path) -> None:
    line = "36 35 98:0 / {point} rw,noatime shared:1 - {fstype} server:/export rw"
    mounts = "\n".join(
        [
            line.format(point="/", fstype="ext4"),
            line.format(point="/mnt", fstype="tmpfs"),
            line.format(point="/mnt/with\\040blank", fstype="nfs4"),
            line.format(point=os.path.realpath(tmp_path), fstype="nfs4"),
            "a line that makes no sense",
        ]
    )
    assert type_of_mount("/var/x", mounts) == "ext4"
    assert type_of_mount("/mnt/x", mounts) == "tmpfs"
    assert type_of_mount("/mnt/with blank/x", mounts) == "nfs4"
    assert type_of_mount("/mntx", mounts) == "ext4"
    assert [is_network(text) for text in ("nfs4", "fuse.sshfs", "9p", "ext4", "overlay", "fuseblk")] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(mounts)
    with pytest.raises(StoreFolderError, match=r"network file system \(nfs4\)"):
        refuse_network(tmp_path / "not" / "yet" / "there", mountinfo=mountinfo)
    with pytest.raises(StoreFolderError, match=r"belongs to the kernel \(proc\); give --store"):
        refuse_network(Path("/proc/self"))
    refuse_network(Path("/"), mountinfo=mountinfo)


WRITER = """
import sys
from pathlib import Path
from fuse_cache.server.cache.disk import DiskTier
from fuse_cache.server.cache.tier import Space
from tests.server.cache.artifacts import artifact
tier = DiskTier(Path(sys.argv[1]), limit_bytes=1 << 30, reserve_bytes=0)
made = [artifact(number, size_bytes=2_000_000) for number in range(4)]
print("ready", flush=True)
while True:
    for one in made:
        one.put_into(tier)
        tier.delete(Space.MANIFEST, one.key)
"""


def test_a_killed_writer_leaves_whole_entries_and_no_rubbish(tmp_path: Path) -> None:
    """Case 14: SIGKILL at ten random points of a publish."""
    made = [artifact(number, size_bytes=2_000_000) for number in range(4)]
    chance = random.Random(14)
    for _ in range(10):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY, env=ENVIRONMENT) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            with suppress(subprocess.TimeoutExpired):
                writer.wait(chance.random() * 0.2)
            assert writer.poll() is None
            writer.kill()
        tier = VerifiedTier(open_disk(tmp_path), CHECKS)
        for one in made:
            content = tier.get(Space.CONTENT, one.digest)
            assert content is None or content.data == one.content
            manifest = tier.get(Space.MANIFEST, one.key)
            assert manifest is None or manifest.data == one.signed_manifest
        tier.close()
    later = DiskTier(tmp_path, limit_bytes=LIMIT_BYTES, now_s=lambda: 2e9, reserve_bytes=0)
    later.maintain()
    assert not list((tmp_path / "temp").iterdir())
    assert later.usage().size_bytes == sum(path.stat().st_size for path in all_files(tmp_path))
    later.close()


def test_a_living_writers_temp_file_is_left_alone(tier: DiskTier) -> None:
    temp = os.path.join(tier.folder.root, "temp", "being-written")
    with tier.folder.files.create(temp):
        assert not tier.folder.dead_temps(now_s=2e9)
    assert tier.folder.dead_temps(now_s=2e9) == [temp]


def test_a_write_larger_than_the_store_is_lost_and_evicts_nothing(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, limit_bytes=100_000)
    artifact(1).put_into(tier)
    with pytest.raises(WriteLostError):
        artifact(2, size_bytes=200_000).put_into(tier)
    assert tier.get(Space.MANIFEST, artifact(1).key) is not None
    assert (tier.usage().lost_writes, tier.usage().evictions) == (1, 0)
    tier.close()
