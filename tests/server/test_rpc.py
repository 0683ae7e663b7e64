"""What a method raises becomes a status that names its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from fuse_cache.server.metrics import Metrics
from fuse_cache.server.rpc import Context, fails_with_status


class _Broken:
    def __init__(self) -> None:
        self._metrics = Metrics()

    @fails_with_status
    async def Divide(self, request: bytes, context: Context) -> bytes:
        return bytes(1 // len(request))


async def test_a_bug_in_a_method_is_internal_with_details_and_counted(tmp_path: Path) -> None:
    service, address = _Broken(), f"unix:{tmp_path / 'socket'}"
    server = grpc.aio.server()
    method: Any = grpc.unary_unary_rpc_method_handler(service.Divide)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Broken", {"Divide": method}),)
    )
    server.add_insecure_port(address)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            call: Any = channel.unary_unary("/test.Broken/Divide")
            assert await call(b"x", timeout=20) == b"\0"
            error: Any = None
            try:
                await call(b"", timeout=20)
            except grpc.aio.AioRpcError as raised:
                error = raised
    finally:
        await server.stop(0)
    assert error.code() is grpc.StatusCode.INTERNAL
    info = error_details_pb2.ErrorInfo()
    status = rpc_status.from_call(error)
    assert status is not None
    assert status.details[0].Unpack(info)
    assert info.reason == "INTERNAL"
    assert b'fuse_cache_requests_total{code="INTERNAL",method="Divide"} 1.0' in service._metrics.render()
