"""Uploads that cannot be spooled are refused by name, and hold no part of the budget."""

from __future__ import annotations

import asyncio
import shutil
import threading
from io import FileIO
from pathlib import Path
from typing import Any, cast

import pytest

from fuse_cache.proto.graph_codec import graph_digest
from fuse_cache.server.errors import BusyError
from fuse_cache.server.spool import Upload
from fuse_cache.server.workfolder import SPOOL_BYTES, WorkFolder


def test_an_upload_that_cannot_begin_gives_its_budget_back(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path)
    shutil.rmtree(work.path)
    with pytest.raises(BusyError, match="cannot spool"):
        Upload(work, digest=bytes(32), size_bytes=1000)
    assert work.reserve(SPOOL_BYTES)


async def test_a_disk_that_is_full_ends_the_upload_as_busy(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path)
    data = b"graph"
    upload = Upload(work, digest=graph_digest(data), size_bytes=len(data))
    upload._file.close()
    with open("/dev/full", "wb", buffering=0) as full:
        upload._file = full
        with pytest.raises(BusyError, match="No space left"):
            await upload.add(data, 0, last=True)
        await upload.close()
    assert work.reserve(SPOOL_BYTES)
    assert not upload.folder.exists()


class _SlowFile:
    """A file whose write hangs until told to go on, as a full write-back queue does."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.closed_during_write = False
        self._writing = False

    def write(self, data: memoryview) -> int:
        self._writing = True
        self.begun.set()
        self.go_on.wait()
        self._writing = False
        return len(data)

    def close(self) -> None:
        self.closed_during_write |= self._writing


async def test_an_upload_that_is_cancelled_in_the_middle_of_a_write_closes_its_file_after_it(
    tmp_path: Path,
) -> None:
    work = WorkFolder(tmp_path)
    data = bytes(200_000)
    upload = Upload(work, digest=bytes(32), size_bytes=len(data))
    upload._file.close()
    slow: Any = _SlowFile()
    upload._file = cast(FileIO, slow)
    adding = asyncio.create_task(upload.add(data, 0, last=False))
    await asyncio.to_thread(slow.begun.wait)
    adding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await adding
    closing = asyncio.create_task(upload.close())
    await asyncio.sleep(0.05)
    closing.cancel()  # The call that uploads ends twice: by its own error and by its caller's leaving.
    await asyncio.sleep(0.05)
    assert upload.folder.exists()
    slow.go_on.set()
    async with asyncio.timeout(10):
        while upload.folder.exists():
            await asyncio.sleep(0.01)
    assert not slow.closed_during_write
    assert work.reserve(SPOOL_BYTES)


def test_an_upload_without_a_file_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_file(*_: object) -> FileIO:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("fuse_cache.server.spool.FileIO", no_file)
    work = WorkFolder(tmp_path)
    with pytest.raises(BusyError, match="Too many open files"):
        Upload(work, digest=bytes(32), size_bytes=1000)
    assert not list(work.path.glob("job-*"))
