"""The pages answer whatever they are asked."""

from __future__ import annotations

import asyncio
from typing import cast

from fuse_cache.server.http import HttpPages
from fuse_cache.server.metrics import Metrics
from fuse_cache.server.status import Status


async def _ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    return answer


async def test_an_address_that_is_none_is_a_bad_request_and_the_connection_ends() -> None:
    pages = HttpPages(cast(Status, None), Metrics())
    port = await pages.start("127.0.0.1:0")
    try:
        answer = await _ask(port, b"GET http://[ HTTP/1.1\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert (await _ask(port, b"GET /healthz HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    finally:
        await pages.stop()
