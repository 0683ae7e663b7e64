"""Damage for messages: of their bytes, and of their fields."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_EXTREMES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
_INT_LIMITS = {
    FieldDescriptor.CPPTYPE_UINT32: 2**32,
    FieldDescriptor.CPPTYPE_UINT64: 2**64,
    FieldDescriptor.CPPTYPE_INT32: 2**31,
    FieldDescriptor.CPPTYPE_INT64: 2**63,
    FieldDescriptor.CPPTYPE_ENUM: 2**31,
}


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return `data` with one to four things wrong: flipped bits, holes, repeats, garbage, a cut."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        kind = rng.randrange(6)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del changed[at:]
        elif kind == 2:
            changed[at:at] = rng.randbytes(rng.randint(1, 16))
        elif kind == 3:
            del changed[at : at + rng.randint(1, 16)]
        elif kind == 4:
            changed[at:at] = changed[at : at + rng.randint(1, 64)] * rng.randint(1, 8)
        else:
            changed[at : at + 8] = rng.choice((b"\xff" * 8, b"\0" * 8, b"\x80" * 8))
    return bytes(changed)


def mutate_fields(message: Message, rng: random.Random) -> None:
    """Give one field of the message, or of a message in it, another value of its type."""
    places: list[Callable[[], None]] = []
    _collect(message, rng, places)
    rng.choice(places)()


def _collect(message: Message, rng: random.Random, places: list[Callable[[], None]]) -> None:
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for part in value if _is_repeated(value) else (value,):
                _collect(part, rng, places)
            if _is_repeated(value):
                places.append(partial(_repeat, value, rng.choice((1, 700))))
        elif not _is_repeated(value):
            places.append(partial(_change, message, field, value, rng))
        places.append(partial(message.ClearField, field.name))
    scalars = [f for f in message.DESCRIPTOR.fields if f.type != FieldDescriptor.TYPE_MESSAGE]
    unset = [f for f in scalars if not _is_repeated(getattr(message, f.name))]
    if unset:
        chosen = rng.choice(unset)
        places.append(partial(_change, message, chosen, chosen.default_value, rng))


def _repeat(rows: Any, times: int) -> None:
    rows.extend(list(rows) * times)


def _change(message: Message, field: Any, value: Any, rng: random.Random) -> None:
    setattr(message, field.name, _other(field, value, rng))


def _is_repeated(value: object) -> bool:
    return hasattr(value, "extend")


def _other(field: Any, value: Any, rng: random.Random) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return not value
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return rng.choice((float("nan"), float("inf"), -1.0, 1e300))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.choice((b"", mutate_bytes(value, rng), rng.randbytes(32), bytes(700_000)))
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(("", "../../etc/passwd", "\0", "a" * 300_000, "\u202e\U0001f600", value + "x"))
    return rng.choice([number for number in _EXTREMES if number < _INT_LIMITS[field.cpp_type]])
