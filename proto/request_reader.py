"""Reads back what `digest.encode_value` wrote. The caller checks that it was canonical, by writing it
again."""

from __future__ import annotations

from fuse_cache.proto.digest import MAX_DEPTH, Kind, Value
from fuse_cache.proto.errors import RequestError
from fuse_cache.proto.varint import token_float, unzigzag


def read_values(data: bytes, start: int) -> list[Value]:
    """Return all values in `data` from byte `start` on. Memory is bounded by a small multiple of `len(data)`.

    Raises:
        RequestError: the bytes are no values.
    """
    reader = _Reader(data, start)
    values = []
    while reader.at < len(data):
        values.append(reader.value(0))
    return values


class _Reader:
    def __init__(self, data: bytes, start: int) -> None:
        self._data = data
        self.at = start

    def value(self, depth: int) -> Value:
        if depth > MAX_DEPTH:
            raise RequestError("values are nested too deep")
        kind = self._take(1)[0]
        if kind == Kind.NONE:
            return None
        if kind in (Kind.FALSE, Kind.TRUE):
            return kind == Kind.TRUE
        if kind == Kind.INT:
            return unzigzag(self._number())
        if kind == Kind.FLOAT:
            return token_float(self._number())
        if kind == Kind.BYTES:
            return self._take(self._number())
        if kind == Kind.STR:
            try:
                return self._take(self._number()).decode()
            except UnicodeDecodeError as error:
                raise RequestError("a text that is not UTF-8") from error
        if kind == Kind.TUPLE:
            count = self._number()
            if count > len(self._data) - self.at:  # each takes a byte at least
                raise RequestError("the request is cut off")
            return tuple([self.value(depth + 1) for _ in range(count)])
        raise RequestError(f"a value of unknown kind {kind}")

    def _take(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise RequestError("the request is cut off")
        self.at += count
        return self._data[self.at - count : self.at]

    def _number(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._take(1)[0]
            value |= (byte & 127) << shift
            if byte < 128:
                if value >= 1 << 64:
                    break
                return value
        raise RequestError("a number of more than 64 bits")
