"""Makes a named refusal of bytes that are no message, or one that costs far more to parse than to send: gRPC
by itself answers UNKNOWN, which hosts take for an outage, or parses 4 MiB of empty items to 200 MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

# Takes the place of a request whose bytes are no message of its type.
UNDECODABLE: Final = object()
# Takes the place of one with more fields than any request of ours has. It is refused before it is parsed.
CROWDED: Final = object()

MAX_FIELDS: Final = 1_100  # At the top: a Lookup and a Report have 1,024 items and a few single fields.
MAX_ITEM_BYTES: Final = 16 * 1024  # Of one item: 64 names of passes, or a detail of 1 KiB.
# Looked at from here on: 32,768 empty items, which parse to 3 MiB. A Lookup of 1,024 items has 200 KiB and is
# looked at in 1 ms, one of 64 not at all.
SCAN_BYTES: Final = 64 * 1024
# Wire types.
_VARINT: Final = 0
_BYTES: Final = 2
_GROUP: Final = 3
_FIXED_BYTES: Final = {1: 8, 5: 4}


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
    """Return a deserializer that gives UNDECODABLE where the other one raises.

    And CROWDED where parsing would cost far more than sending did.
    """
    fields = deserialize(b"").DESCRIPTOR.fields_by_number
    messages = frozenset(number for number, field in fields.items() if field.message_type is not None)

    def decode(data: bytes) -> Any:
        if len(data) >= SCAN_BYTES and is_crowded(data, messages):
            return CROWDED
        try:
            return deserialize(data)
        except DecodeError:
            return UNDECODABLE

    return decode


def is_crowded(data: bytes, messages: frozenset[int]) -> bool:
    """Tell whether a serialised message has more fields than a request of ours, without parsing it.

    `messages` are the numbers of its fields that are messages themselves; their size is bounded instead.
    Bytes that are no message are not crowded: the parser says what they are.
    """
    at, end = 0, len(data)
    for _ in range(MAX_FIELDS):
        if at >= end:
            return False
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _BYTES:
            size_bytes, at = _varint(data, at)
            if size_bytes > MAX_ITEM_BYTES and tag >> 3 in messages:
                return True
            at += size_bytes
        elif kind == _VARINT:
            _, at = _varint(data, at)
        elif kind in _FIXED_BYTES:
            at += _FIXED_BYTES[kind]
        else:
            return kind == _GROUP  # Nobody sends one, and only a parser finds its end.
    return at < end


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at `at` and where it ends; beyond the end of `data` when it is cut off."""
    value = 0
    for position in range(at, min(at + 10, len(data))):
        value |= (data[position] & 127) << 7 * (position - at)
        if data[position] < 128:
            return value, position + 1
    return value, len(data)
