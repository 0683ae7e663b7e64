"""A circuit breaker for one endpoint: after three outages in a row it costs nothing until the daemon is
back."""

from __future__ import annotations

import time
from collections.abc import Callable

from fuse_cache.client.forklock import ForkLock

THRESHOLD = 3
FIRST_OPEN_S = 1.0  # A daemon that restarts is back within seconds, and a probe costs 250 ms at most.
LONGEST_OPEN_S = 30.0


class Breaker:
    """Counts outages. Closed: calls pass. Open: none does. After a while one call, the probe, passes and
    decides.

    Safe for concurrent use. Only "the endpoint did not answer" counts; an answer that says no is an answer.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = ForkLock()  # Guards all below. Nothing else is taken while it is held.
        self._failures = 0
        self._open_s = FIRST_OPEN_S
        self._probe_at_s: float | None = None  # None: closed

    def allows(self) -> bool:
        """Tell whether a call may be made now. True while open makes the caller the probe: it must report
        back."""
        with self._lock:
            if self._probe_at_s is None:
                return True
            now = self._now_s()
            if now < self._probe_at_s:
                return False
            self._probe_at_s = now + self._open_s  # The next probe, should this caller never report back.
            return True

    def succeeded(self) -> None:
        """The endpoint answered."""
        with self._lock:
            self._failures, self._open_s, self._probe_at_s = 0, FIRST_OPEN_S, None

    def failed(self) -> None:
        """The endpoint did not answer."""
        with self._lock:
            self._failures += 1
            if self._failures < THRESHOLD:
                return
            if self._probe_at_s is not None:
                self._open_s = min(self._open_s * 2, LONGEST_OPEN_S)
            self._probe_at_s = self._now_s() + self._open_s

    @property
    def is_open(self) -> bool:
        """Whether calls are being refused."""
        with self._lock:
            return self._probe_at_s is not None
