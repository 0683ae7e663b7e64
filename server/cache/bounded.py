"""No tier can hold its caller for longer than agreed, and one that keeps failing is not asked for a while."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

from fuse_cache.server.cache.tier import Entry, Space, Stored, Tier, TierUnavailableError, TierWrapper, Usage

T = TypeVar("T")


class Breaker:
    """Opens after `failures` in a row; after `open_s` it lets one call through to see. Safe for threads."""

    def __init__(
        self, *, failures: int = 3, open_s: float = 5.0, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = failures
        self._open_s = open_s
        self._now_s = now_s
        self._lock = threading.Lock()  # Guards the next three. Nothing else happens under it.
        self._failures = 0
        self._opened_at_s: float | None = None
        self._probing = False

    def allow(self) -> bool:
        """Tell whether to call. After True, `succeeded` or `failed` must follow."""
        with self._lock:
            if self._opened_at_s is None:
                return True
            if self._probing or self._now_s() - self._opened_at_s < self._open_s:
                return False
            self._probing = True
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._failures, self._opened_at_s, self._probing = 0, None, False

    def failed(self) -> None:
        with self._lock:
            self._failures += 1
            if self._probing or self._failures >= self._limit:
                self._opened_at_s = self._now_s()
            self._probing = False

    @property
    def is_open(self) -> bool:
        with self._lock:
            return self._opened_at_s is not None


class BoundedTier(TierWrapper):
    """Gives the tier's calls a time limit and a breaker.

    A call that is out of time goes on in its thread (a system call on a sick disk cannot be stopped) and its
    answer is thrown away; a put may thus still land, whole. The threads are daemons: they never hold up the
    end of the process.
    """

    def __init__(
        self,
        base: Tier,
        *,
        get_timeout_s: float = 2.0,
        put_timeout_s: float = 60.0,
        threads: int = 4,
        breaker: Breaker | None = None,
    ) -> None:
        super().__init__(base)
        self._get_timeout_s = get_timeout_s
        self._put_timeout_s = put_timeout_s
        self._breaker = breaker or Breaker()
        self._threads = _DaemonThreads(threads, name=f"{base.name}-tier")

    def get(self, space: Space, name: bytes) -> Entry | None:
        return self._call(lambda: self.base.get(space, name), self._get_timeout_s)

    def put(self, space: Space, name: bytes, entry: Entry) -> None:
        self._call(lambda: self.base.put(space, name, entry), self._put_timeout_s)

    def contains(self, space: Space, name: bytes) -> bool:
        return self._call(lambda: self.base.contains(space, name), self._get_timeout_s)

    def delete(self, space: Space, name: bytes) -> bool:
        return self._call(lambda: self.base.delete(space, name), self._put_timeout_s)

    def quarantine(self, space: Space, name: bytes) -> bool:
        return self._call(lambda: self.base.quarantine(space, name), self._put_timeout_s)

    def iterate(self, space: Space) -> Iterator[Stored]:
        """Not bounded: a listing takes as long as it takes, and nobody's lookup waits for it."""
        return self.base.iterate(space)

    def naming(self, content: bytes) -> list[bytes]:
        return self._call(lambda: self.base.naming(content), self._get_timeout_s)

    def touch(self, space: Space, names: Collection[bytes]) -> None:
        self.base.touch(space, names)

    def usage(self) -> Usage:
        with contextlib.suppress(TierUnavailableError):
            return self._call(self.base.usage, self._get_timeout_s)
        return Usage()

    def health(self) -> str:
        if self._breaker.is_open:
            return self.base.health() or f"{self.name}: does not answer in time"
        return self.base.health()

    def close(self) -> None:
        self.base.close()
        self._threads.close()

    def _call(self, action: Callable[[], T], timeout_s: float) -> T:
        if not self._breaker.allow():
            raise TierUnavailableError(self.name, "not asked: it failed several times in a row")
        answered = False
        try:
            result = self._threads.run(action, timeout_s)
            answered = True
            return result
        except FutureTimeoutError as error:
            raise TierUnavailableError(self.name, f"no answer within {timeout_s:g} s") from error
        except TierUnavailableError:
            raise
        except Exception:
            answered = True  # Damage, a lost write: the tier works.
            raise
        finally:
            if answered:
                self._breaker.succeeded()
            else:
                self._breaker.failed()


class _DaemonThreads:
    """A few threads for calls that may hang. concurrent.futures' own pool would wait for them when the
    process ends.
    """

    def __init__(self, count: int, *, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._count = count
        self._name = name
        self._lock = threading.Lock()  # Guards _started.
        self._started = False

    def run(self, action: Callable[[], T], timeout_s: float) -> T:
        """Return what `action` returns. Raises: concurrent.futures.TimeoutError, and what it raises."""
        self._start()
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return  # Nobody waits any more, and it never began.
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)

        self._jobs.put(job)
        try:
            return future.result(timeout_s)
        except (FutureTimeoutError, CancelledError):
            future.cancel()
            raise

    def close(self) -> None:
        with self._lock:
            for _ in range(self._count if self._started else 0):
                self._jobs.put(None)
            self._started = False

    def _start(self) -> None:
        # Lazily, so that a process may still fork before the first call.
        with self._lock:
            if not self._started:
                for number in range(self._count):
                    threading.Thread(target=self._work, name=f"{self._name}-{number}", daemon=True).start()
                self._started = True

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # It holds its answer, 64 MiB perhaps, which must not stay with an idle thread.
