"""Imports end in time, whatever their sender does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from fuse_cache.proto.admin_pb2 import ImportRequest, ImportResponse
from fuse_cache.server.admin import AdminService
from fuse_cache.server.metrics import Metrics


class _Aborted(Exception):
    pass


class _Context:
    """What of gRPC's context is used."""

    def __init__(self) -> None:
        self.code: grpc.StatusCode | None = None

    def time_remaining(self) -> None:
        return None

    async def abort(self, code: grpc.StatusCode, details: str, trailers: object) -> None:
        self.code = code
        raise _Aborted(details)


async def test_an_import_that_stalls_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuse_cache.server.admin.IMPORT_PATIENCE_S", 0.2)
    nothing: Any = None
    service: Any = AdminService(
        store=nothing,
        status=nothing,
        reports=nothing,
        metrics=Metrics(),
        recalls=nothing,
        drain=lambda grace_s: 0,
    )

    async def silence() -> AsyncIterator[ImportRequest]:
        await asyncio.sleep(60)
        yield ImportRequest()

    async def empty() -> AsyncIterator[ImportRequest]:
        return
        yield

    stalled = _Context()
    first = asyncio.create_task(service.Import(silence(), stalled))
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        answer = await service.Import(empty(), _Context())
        assert answer == ImportResponse()
        with pytest.raises(_Aborted, match="too slow"):
            await first
    assert stalled.code is grpc.StatusCode.DATA_LOSS
