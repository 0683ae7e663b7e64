"""The recent misses, with the fields of their keys, so that a miss can be explained by what differs."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

CAPACITY = 1024  # Misses of 30 fields, about 4 KiB each: 4 MiB.
MAX_CHARS = 8 << 20  # Of all texts. The fields of a hostile request may be 64 KiB of options.

Described = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Miss:
    """One missed request. Fields of the request itself are known only if it went on to Compile."""

    request_digest: bytes
    namespace: str
    unix_ms: int
    fields: Described


class MissLog:
    """The last misses by request digest; the same one again replaces itself."""

    def __init__(self, now_s: Callable[[], float] = time.time) -> None:
        self._now_s = now_s
        self._misses: OrderedDict[tuple[str, bytes], Miss] = OrderedDict()
        self._chars = 0

    def add(self, namespace: str, request_digest: bytes, fields: Described) -> None:
        """Note a miss. One that was noted with more fields keeps them."""
        name = (namespace, request_digest)
        before = self._misses.pop(name, None)
        if before is not None:
            self._chars -= _chars(before)
            if len(before.fields) > len(fields):
                fields = before.fields
        miss = self._misses[name] = Miss(request_digest, namespace, int(self._now_s() * 1000), fields)
        self._chars += _chars(miss)
        while len(self._misses) > CAPACITY or self._chars > MAX_CHARS:
            self._chars -= _chars(self._misses.popitem(last=False)[1])

    def recent(self, namespace: str) -> list[Miss]:
        """Return the misses of a namespace, the latest first."""
        return [miss for miss in reversed(self._misses.values()) if miss.namespace == namespace]

    def find(self, namespace: str, request_digest: bytes) -> Miss | None:
        """Return the miss of one request."""
        return self._misses.get((namespace, request_digest))


def _chars(miss: Miss) -> int:
    return sum(len(name) + len(value) for name, value in miss.fields)
