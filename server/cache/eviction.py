"""Which entries to give up when room is needed. Pure: nothing is deleted here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

# An entry that nobody used for a day is worth half. A thousand-fold difference in seconds per byte (a
# 10-minute GPU piece against a 0.6 s CPU one of the same size) thus lasts ten days.
HALF_LIFE_S = 86_400.0
# Every entry costs something to lose, and a file takes a block and an inode whatever its size.
MIN_COST_S = 0.1
FILE_OVERHEAD_BYTES = 4_096


class Candidate(NamedTuple):
    """One thing that could go, as a whole."""

    name: bytes
    size_bytes: int
    cost_s: float
    used_unix_s: float


def worth(candidate: Candidate, *, now_s: float) -> float:
    """Return log2 of (compile seconds per byte, halved for every HALF_LIFE_S since the last use).

    Higher stays longer.
    """
    cost_s = max(candidate.cost_s, 0.0) + MIN_COST_S if math.isfinite(candidate.cost_s) else MIN_COST_S
    size_bytes = max(candidate.size_bytes, 0) + FILE_OVERHEAD_BYTES
    # A clock that was set back makes an entry young, not priceless.
    age_s = max(now_s - candidate.used_unix_s, 0.0)
    return math.log2(cost_s) - math.log2(size_bytes) - age_s / HALF_LIFE_S


def choose_victims(candidates: Iterable[Candidate], *, needed_bytes: int, now_s: float) -> list[Candidate]:
    """Return the least worthy candidates whose sizes add up to `needed_bytes`, in the order to delete them.

    All of them when they do not add up; none when nothing is needed. Ties go by age, then name, so that the
    choice is the same in every process.
    """
    if needed_bytes <= 0:
        return []
    ranked = sorted(
        (worth(candidate, now_s=now_s), candidate.used_unix_s, candidate.name, candidate)
        for candidate in candidates
    )
    victims: list[Candidate] = []
    freed_bytes = 0
    for _, _, _, candidate in ranked:
        if freed_bytes >= needed_bytes:
            break
        victims.append(candidate)
        freed_bytes += candidate.size_bytes
    return victims
