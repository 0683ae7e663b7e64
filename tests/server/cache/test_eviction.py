"""Who has to go: compile seconds per byte, weighed by the time since the last use."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from fuse_cache.server.cache.eviction import HALF_LIFE_S, Candidate, choose_victims, worth

NOW_S = 1_000_000_000.0
MIB = 1024 * 1024


def candidate(name: str, *, size_bytes: int = MIB, cost_s: float = 10.0, age_s: float = 0.0) -> Candidate:
    return Candidate(name.encode(), size_bytes, cost_s, NOW_S - age_s)


def names(victims: list[Candidate]) -> list[str]:
    return [victim.name.decode() for victim in victims]


def test_the_cheap_one_goes_before_the_dear_one_of_the_same_size_and_age() -> None:
    entries = [candidate("dear", cost_s=600), candidate("cheap", cost_s=1)]
    assert names(choose_victims(entries, needed_bytes=1, now_s=NOW_S)) == ["cheap"]


def test_the_big_one_goes_before_the_small_one_of_the_same_cost() -> None:
    entries = [candidate("small", size_bytes=MIB // 10), candidate("big", size_bytes=10 * MIB)]
    assert names(choose_victims(entries, needed_bytes=1, now_s=NOW_S)) == ["big"]


def test_age_alone_does_not_decide() -> None:
    """A ten-minute compilation that rested for three days outlives a one-second one of today."""
    entries = [candidate("old and dear", cost_s=600, age_s=3 * 86_400), candidate("new and cheap", cost_s=1)]
    assert names(choose_victims(entries, needed_bytes=1, now_s=NOW_S)) == ["new and cheap"]


def test_nothing_is_kept_for_ever() -> None:
    entries = [candidate("dear", cost_s=600, age_s=30 * 86_400), candidate("cheap", cost_s=1)]
    assert names(choose_victims(entries, needed_bytes=1, now_s=NOW_S)) == ["dear"]


def test_a_half_life_without_use_halves_the_worth() -> None:
    fresh, rested = worth(candidate("a"), now_s=NOW_S), worth(candidate("a", age_s=HALF_LIFE_S), now_s=NOW_S)
    assert math.isclose(fresh - rested, 1.0)


def test_among_equals_the_longest_unused_goes_first() -> None:
    entries = [
        candidate("b", cost_s=0, age_s=5),
        candidate("c", cost_s=0, age_s=50),
        candidate("a", cost_s=0, age_s=0),
    ]
    assert names(choose_victims(entries, needed_bytes=3 * MIB, now_s=NOW_S)) == ["c", "b", "a"]


CANDIDATES = st.lists(
    st.builds(
        Candidate,
        st.binary(min_size=1, max_size=4),
        st.integers(0, 1 << 40),
        st.floats(allow_nan=True, allow_infinity=True),
        st.floats(min_value=0, max_value=4e9),
    ),
    unique_by=lambda entry: entry.name,
    max_size=30,
)


@given(CANDIDATES, st.integers(-10, 1 << 41))
def test_just_enough_is_chosen_whatever_the_entries_say(entries: list[Candidate], needed_bytes: int) -> None:
    """Damaged rows may hold any number."""
    victims = choose_victims(entries, needed_bytes=needed_bytes, now_s=NOW_S)
    assert len(set(victims)) == len(victims)
    assert set(victims) <= set(entries)
    freed_bytes = sum(victim.size_bytes for victim in victims)
    assert freed_bytes >= needed_bytes or len(victims) == len(entries)
    if victims:
        assert freed_bytes - victims[-1].size_bytes < needed_bytes
    assert choose_victims(list(reversed(entries)), needed_bytes=needed_bytes, now_s=NOW_S) == victims
