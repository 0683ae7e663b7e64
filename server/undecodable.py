"""Makes a named refusal of bytes that are no message: gRPC by itself answers UNKNOWN, which hosts take for an
outage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

# Takes the place of a request whose bytes are no message of its type.
UNDECODABLE: Final = object()


class NamedRefusals:
    """A server as `add_XServicer_to_server` sees it, whose unary handlers get UNDECODABLE instead of raising.

    Streams need none of it: there the message is read, and the error raised, within the method.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Leave the table out: `add_registered_method_handlers` gets the same one by method."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Serve the methods of one service."""
        named = {
            name: handler
            if handler.request_streaming
            else handler._replace(request_deserializer=patient(handler.request_deserializer))
            for name, handler in handlers.items()
        }
        generic = grpc.method_handlers_generic_handler(service, named)
        self._server.add_generic_rpc_handlers((generic,))


def patient(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a deserializer that gives UNDECODABLE where the other one raises."""

    def decode(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return UNDECODABLE

    return decode
