"""The floor: a bare grpc.aio server, the daemon's own kind, that answers bytes from memory alone.

Run as a process: `bare.py unix:PATH`. `Get` answers the number of bytes asked for; `Stream` sends them in
512 KiB messages.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

CHUNK_BYTES = 512 * 1024


async def _serve(address: str) -> None:
    contents: dict[int, bytes] = {}

    def content(request: bytes) -> bytes:
        size = int(request)
        if size not in contents:
            contents[size] = bytes(size)
        return contents[size]

    async def get(request: bytes, context: Any) -> bytes:
        return content(request)

    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        data = content(request)
        for offset in range(0, len(data), CHUNK_BYTES):
            yield data[offset : offset + CHUNK_BYTES]

    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Get": grpc.unary_unary_rpc_method_handler(get),
        "Stream": grpc.unary_stream_rpc_method_handler(stream),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Bare", handlers),))
    server.add_insecure_port(address)
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
