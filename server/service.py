"""The Compile service: messages in, messages out. What to answer is decided elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from fuse_cache.proto import compile_pb2, compile_pb2_grpc
from fuse_cache.proto.compile_pb2 import Priority as WirePriority
from fuse_cache.server.admission import Gate, check_digest, check_namespace
from fuse_cache.server.builders import Builders
from fuse_cache.server.errors import InvalidRequestError, UnavailableError
from fuse_cache.server.explain import Explainer
from fuse_cache.server.fetch import ContentStreams
from fuse_cache.server.follow import Follower
from fuse_cache.server.jobs import Priority
from fuse_cache.server.lookup import Lookups
from fuse_cache.server.metrics import Metrics
from fuse_cache.server.reports import Reports
from fuse_cache.server.rpc import Context, needs_deadline
from fuse_cache.server.status import Status
from fuse_cache.server.undecodable import patient


class CompileService(compile_pb2_grpc.CompileServicer):
    """Implements `Compile` of compile.proto, which says what each method promises."""

    def __init__(
        self,
        *,
        lookups: Lookups,
        follower: Follower,
        streams: ContentStreams,
        reports: Reports,
        explainer: Explainer,
        gate: Gate,
        builders: Builders,
        status: Status,
        metrics: Metrics,
    ) -> None:
        self._lookups = lookups
        self._follower = follower
        self._streams = streams
        self._reports = reports
        self._explainer = explainer
        self._gate = gate
        self._builders = builders
        self._status = status
        self._metrics = metrics

    @needs_deadline
    async def Lookup(
        self, request: compile_pb2.LookupRequest, context: Context
    ) -> compile_pb2.LookupResponse:
        return compile_pb2.LookupResponse.FromString(await self._lookups.answer(request))

    @needs_deadline
    async def lookup_bytes(self, request: compile_pb2.LookupRequest, context: Context) -> bytes:
        """Answer `Lookup` with its serialised reply."""
        return await self._lookups.answer(request)

    @needs_deadline
    async def Compile(self, requests: AsyncIterator[compile_pb2.CompileRequest], context: Context) -> None:
        if self._status.draining:
            raise UnavailableError("DRAINING", "this daemon is stopping; ask another one, or compile locally")

        async def receive() -> compile_pb2.CompileRequest | None:
            message = await context.read()
            return None if message is grpc.aio.EOF else message

        first = await receive()
        if first is None or first.WhichOneof("message") != "start":
            raise InvalidRequestError("REQUEST_MALFORMED", "the first message must be start")
        start = first.start
        await self._builders.look()
        admitted = self._gate.admit(start)
        self._explainer.note_miss(admitted)
        await self._follower.compile(
            admitted,
            priority=Priority.WARM if start.priority == WirePriority.PRIORITY_WARM else Priority.HOST,
            graph_bytes=start.graph_bytes,
            inline_limit=start.inline_limit_bytes,
            send=context.write,
            receive=receive,
        )

    @needs_deadline
    async def Wait(self, request: compile_pb2.WaitRequest, context: Context) -> None:
        check_namespace(request.namespace)
        check_digest("key", request.key)
        await self._follower.wait(
            request.key, request.namespace, inline_limit=request.inline_limit_bytes, send=context.write
        )

    @needs_deadline
    async def Fetch(self, request: compile_pb2.FetchRequest, context: Context) -> None:
        """Answer `Fetch` with serialised messages (`raw_handler`)."""
        # One chunk is made when the one before has left: a slow reader holds two, and the transport's own
        # window. Closed at once when the reader goes: its content may make room for others.
        async with contextlib.aclosing(self._streams.chunks(request)) as chunks:
            async for message in chunks:
                await context.write(message)

    @needs_deadline
    async def Report(
        self, request: compile_pb2.ReportRequest, context: Context
    ) -> compile_pb2.ReportResponse:
        check_namespace(request.namespace)
        await self._reports.take(request)
        return compile_pb2.ReportResponse()

    @needs_deadline
    async def Explain(
        self, request: compile_pb2.ExplainRequest, context: Context
    ) -> compile_pb2.ExplainResponse:
        check_namespace(request.namespace)
        return await self._explainer.explain(request)

    @needs_deadline
    async def Capabilities(
        self, request: compile_pb2.CapabilitiesRequest, context: Context
    ) -> compile_pb2.CapabilitiesResponse:
        return self._status.capabilities()


def raw_handler(service: CompileService) -> grpc.GenericRpcHandler:
    """Return a handler for `Lookup` and `Fetch` that sends their serialised messages as they are."""
    lookup: Any = grpc.unary_unary_rpc_method_handler(
        service.lookup_bytes, request_deserializer=patient(compile_pb2.LookupRequest.FromString)
    )
    fetch: Any = grpc.unary_stream_rpc_method_handler(
        service.Fetch, request_deserializer=patient(compile_pb2.FetchRequest.FromString)
    )
    name = compile_pb2.DESCRIPTOR.services_by_name["Compile"].full_name
    return grpc.method_handlers_generic_handler(name, {"Lookup": lookup, "Fetch": fetch})
