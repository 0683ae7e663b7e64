"""The breaker by a clock of our own."""

from __future__ import annotations

from fuse_cache.client.breaker import FIRST_OPEN_S, LONGEST_OPEN_S, THRESHOLD, Breaker


class Clock:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _opened(clock: Clock) -> Breaker:
    breaker = Breaker(clock)
    for _ in range(THRESHOLD):
        breaker.failed()
    return breaker


def test_it_opens_after_three_outages_in_a_row_and_no_sooner() -> None:
    breaker = Breaker(Clock())
    for _ in range(THRESHOLD - 1):
        breaker.failed()
    assert breaker.allows()
    breaker.succeeded()
    for _ in range(THRESHOLD):
        assert breaker.allows()
        breaker.failed()
    assert not breaker.allows()


def test_one_probe_passes_after_a_while_and_closes_it_when_answered() -> None:
    clock = Clock()
    breaker = _opened(clock)
    clock.now_s += FIRST_OPEN_S
    assert breaker.allows()
    assert not breaker.allows()
    breaker.succeeded()
    assert breaker.allows()
    assert not breaker.is_open


def test_each_probe_in_vain_doubles_the_wait_up_to_a_bound() -> None:
    clock = Clock()
    breaker = _opened(clock)
    waits = []
    for _ in range(8):
        start = clock.now_s
        while not breaker.allows():
            clock.now_s += 0.25
        waits.append(clock.now_s - start)
        breaker.failed()
    assert waits[:3] == [FIRST_OPEN_S, 2 * FIRST_OPEN_S, 4 * FIRST_OPEN_S]
    assert waits[-1] == LONGEST_OPEN_S


def test_a_probe_that_never_reports_back_does_not_keep_it_open_for_ever() -> None:
    clock = Clock()
    breaker = _opened(clock)
    clock.now_s += FIRST_OPEN_S
    assert breaker.allows()
    clock.now_s += FIRST_OPEN_S
    assert breaker.allows()
