"""Locks that a forked child can take though another thread of the parent held them when it forked.

A child has one thread: whoever held a lock is not there to give it back. What the client's locks guard is in
memory, and a change of it that the fork cut short costs a child an entry, or a count of bytes that is off by
one entry, and nothing that is checked before it is used.
"""

from __future__ import annotations

import os
import threading
import weakref


class ForkLock:
    """A mutual exclusion, not re-entrant, that is free in every new child. Use as a context manager."""

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Free it, whoever holds it."""
        self._lock = threading.Lock()


_all: weakref.WeakSet[ForkLock] = weakref.WeakSet()


def _renew_all() -> None:
    for lock in list(_all):
        lock.renew()


os.register_at_fork(after_in_child=_renew_all)
