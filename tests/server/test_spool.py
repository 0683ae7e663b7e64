"""Uploads that cannot be spooled are refused by name, and hold no part of the budget."""

from __future__ import annotations

import shutil
from pathlib import Path

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
