"""Which artifacts are instances of one request but for the range: what a covering lookup asks."""

from __future__ import annotations

import sys
import threading
from typing import NamedTuple

from fuse_cache.server.cache.facts import Facts


class _Member(NamedTuple):
    namespace: str
    symbol_plus_one: int
    lower: int
    upper: int
    revision: int


class FamilyIndex:
    """Keys by family, in memory. A hint: what it names may be gone, so each key is looked up before it is
    served.

    100,000 members cost about 30 MB; it is filled in the background after start, and only slows covering
    lookups until then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # Guards _families. Nothing else happens under it.
        self._families: dict[bytes, dict[bytes, _Member]] = {}

    def add(self, key: bytes, facts: Facts) -> None:
        if not facts.family or not facts.symbol_plus_one:
            return  # Static pieces cover nothing but themselves.
        member = _Member(
            sys.intern(facts.namespace), facts.symbol_plus_one, facts.lower, facts.upper, facts.revision
        )
        with self._lock:
            self._families.setdefault(facts.family, {})[key] = member

    def discard(self, key: bytes, family: bytes) -> None:
        with self._lock:
            members = self._families.get(family)
            if members is not None:
                members.pop(key, None)
                if not members:
                    del self._families[family]

    def keep(self, keys: set[bytes]) -> None:
        """Forget all members but these."""
        with self._lock:
            for family, members in list(self._families.items()):
                for key in [key for key in members if key not in keys]:
                    del members[key]
                if not members:
                    del self._families[family]

    def covering(
        self,
        namespace: str,
        family: bytes,
        *,
        symbol_plus_one: int,
        lower: int,
        upper: int,
        max_revision: int = 0,
    ) -> list[bytes]:
        """Return the keys whose range holds [lower, upper], the tightest first; of equal ranges the highest
        revision first.
        """
        with self._lock:
            members = list(self._families.get(family, {}).items())
        fitting = [
            (member.upper - member.lower, -member.revision, key)
            for key, member in members
            if member.namespace == namespace
            and member.symbol_plus_one == symbol_plus_one
            and member.lower <= lower
            and upper <= member.upper
            and member.revision <= max_revision
        ]
        return [key for _, _, key in sorted(fitting)]

    def __len__(self) -> int:
        with self._lock:
            return sum(len(members) for members in self._families.values())
