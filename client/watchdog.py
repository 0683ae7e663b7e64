"""Ends calls that say nothing: one thread of this process watches all streams, and only while there are
any."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

_TICK_S = 0.05  # How late silence may be noticed; bounds are seconds.


class Watch:
    """One stream under watch. `fed()` puts the deadline off; `silent` says that it passed and `cancel` was
    called."""

    __slots__ = ("_cancel", "_silence_s", "deadline_s", "silent")

    def __init__(self, cancel: Callable[[], object], silence_s: float) -> None:
        self._cancel = cancel
        self._silence_s = silence_s
        self.deadline_s = time.monotonic() + silence_s
        self.silent = False

    def fed(self) -> None:
        """Something came."""
        self.deadline_s = time.monotonic() + self._silence_s

    def expire(self) -> None:
        """Nothing came in time."""
        self.silent = True
        self._cancel()


class Watchdog:
    """Watches streams from a thread that is started when it is first needed in a process."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        # Guards _watches and _running. Not held while a call is cancelled.
        self._changed = threading.Condition()
        self._watches: set[Watch] = set()
        self._running = False

    def add(self, watch: Watch) -> None:
        """Watch a stream until `remove`."""
        if self._pid != os.getpid():
            self._reset()  # After a fork: the parent's thread and streams are not here.
        with self._changed:
            self._watches.add(watch)
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="fuse-cache-watch", daemon=True).start()
            else:
                self._changed.notify()

    def remove(self, watch: Watch) -> None:
        """Stop watching."""
        with self._changed:
            self._watches.discard(watch)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._watches:
                    self._changed.wait()
                now = time.monotonic()
                late = [watch for watch in self._watches if now >= watch.deadline_s]
                self._watches.difference_update(late)
            for watch in late:
                watch.expire()
            time.sleep(_TICK_S)


watchdog = Watchdog()
