"""Digests over named, typed fields. No field can be mistaken for another, or for two."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final, TypeAlias

from blake3 import blake3

from fuse_cache.proto.varint import float_token, pack, zigzag

Value: TypeAlias = "bool | int | float | str | bytes | tuple[Value, ...] | None"

MAX_DEPTH: Final = 8  # of nested tuples; 2 are used


class Kind(enum.IntEnum):
    """The first byte of a value. Part of the format."""

    NONE = 0
    FALSE = 1
    TRUE = 2
    INT = 3
    FLOAT = 4
    STR = 5
    BYTES = 6
    TUPLE = 7


def encode_value(value: Value) -> bytes:
    """Return the one byte form of `value`: type, length where it varies, content. 1, 1.0 and True differ.

    Raises:
        TypeError: it is of another type, an integer beyond 64 bits, or nested too deep.
    """
    out = bytearray()
    _append(out, value, 0)
    return bytes(out)


def _append(out: bytearray, value: Value, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise TypeError(f"a value of more than {MAX_DEPTH} nested tuples")
    kind = type(value)
    if value is None:
        out.append(Kind.NONE)
    elif value is True or value is False:
        out.append(Kind.TRUE if value else Kind.FALSE)
    elif kind is int:
        assert isinstance(value, int)
        if not -(1 << 63) <= value < 1 << 63:
            raise TypeError("an integer of more than 64 bits")
        out.append(Kind.INT)
        out += pack((zigzag(value),))
    elif kind is float:
        assert isinstance(value, float)
        out.append(Kind.FLOAT)
        out += pack((float_token(value),))
    elif kind is str or kind is bytes:
        assert isinstance(value, str | bytes)
        data = value.encode() if isinstance(value, str) else value
        out.append(Kind.STR if kind is str else Kind.BYTES)
        out += pack((len(data),))
        out += data
    elif kind is tuple:
        assert isinstance(value, tuple)
        out.append(Kind.TUPLE)
        out += pack((len(value),))
        for part in value:
            _append(out, part, depth + 1)
    else:
        raise TypeError(f"a value of type {kind.__name__} has no digest")


class FieldDigest:
    """BLAKE3 over fields in the order they are added, under a context that no other kind of digest uses.

    Context strings are kept for ever: another form takes another context.
    """

    def __init__(self, context: str) -> None:
        self._hash = blake3(derive_key_context=context)

    def add(self, name: str, value: Value) -> FieldDigest:
        """Add one field and return self.

        Raises:
            TypeError: see `encode_value`.
        """
        self._hash.update(encode_value(name) + encode_value(value))
        return self

    def add_all(self, fields: Iterable[tuple[str, Value]]) -> FieldDigest:
        """Add fields in their order and return self."""
        for name, value in fields:
            self.add(name, value)
        return self

    def digest(self) -> bytes:
        """Return the 32 bytes."""
        return self._hash.digest()
