"""Runs of whole numbers as bytes: LEB128, least significant group first, always in the shortest form."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

MAX_TOKEN: Final = (
    1 << 70
) - 1  # ten bytes of seven bits: a zigzagged 64-bit integer with a four-bit tag fits


class VarintError(ValueError):
    """The bytes are not numbers in their shortest form."""


def zigzag(value: int) -> int:
    """Map 0, -1, 1, -2, ... to 0, 1, 2, 3, ..."""
    return value << 1 if value >= 0 else (-value << 1) - 1


def unzigzag(token: int) -> int:
    """Undo `zigzag`."""
    return token >> 1 if not token & 1 else -((token + 1) >> 1)


def float_token(value: float) -> int:
    """Return the float's 64 bits, NaN payloads included, so arranged that round numbers are short."""
    return int.from_bytes(struct.pack(">d", value), "little")


def token_float(token: int) -> float:
    """Undo `float_token`. Raises OverflowError for more than 64 bits."""
    (value,) = struct.unpack(">d", token.to_bytes(8, "little"))
    assert isinstance(value, float)
    return value


def pack(tokens: Iterable[int]) -> bytes:
    """Return the bytes of `tokens`, which are in 0 .. MAX_TOKEN."""
    out = bytearray()
    append = out.append
    for token in tokens:
        while token > 127:
            append(token & 127 | 128)
            token >>= 7
        append(token)
    return bytes(out)


def unpack(data: bytes, start: int = 0) -> list[int]:
    """Return the numbers in `data` from byte `start` on.

    The list takes at most 18 bytes of memory per byte of `data`, which callers bound.

    Raises:
        VarintError: a number is not in its shortest form, longer than ten bytes, or cut off.
    """
    tokens: list[int] = []
    append = tokens.append
    value = 0
    shift = 0
    for byte in memoryview(data)[start:]:
        if byte > 127:
            value |= (byte & 127) << shift
            shift += 7
            if shift > 63:
                raise VarintError("a number of more than ten bytes")
        elif not shift:
            append(byte)
        else:
            if not byte:
                raise VarintError("a number that is not in its shortest form")
            append(value | byte << shift)
            value = 0
            shift = 0
    if shift:
        raise VarintError("the last number is cut off")
    return tokens
