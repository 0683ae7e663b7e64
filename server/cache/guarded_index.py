"""The index as the disk tier uses it: damage is rebuilt, a full disk gets the reserve, the rest is one of the
tier's errors.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from fuse_cache.server.cache.folder import FULL_ERRNOS, Folder
from fuse_cache.server.cache.index import Index
from fuse_cache.server.cache.index_errors import (
    IndexBrokenError,
    IndexBusyError,
    IndexFullError,
    IndexProblem,
    IndexReadOnlyError,
)
from fuse_cache.server.cache.reconcile import Reconciled, reconcile
from fuse_cache.server.cache.tier import TierError, TierUnavailableError, WriteLostError

log = logging.getLogger(__name__)
T = TypeVar("T")

# Up to 5,000 entries are read in within this; a larger store goes on with what its index knows so far.
SETTLE_WAIT_S = 2.0


class GuardedIndex:
    """Runs index calls and mends what stops them. Safe for threads."""

    def __init__(self, folder: Folder, *, tier: str, now_s: Callable[[], float]) -> None:
        self.index = Index(folder.root)
        self.rebuilds = 0
        self.trouble = ""  # why the last call failed, "" since one worked
        self._folder = folder
        self._tier = tier
        self._now_s = now_s
        self._reading = threading.Lock()  # One thread reads the files in at a time. Held during I/O.
        self._lock = threading.Lock()  # Guards _reader.
        self._reader: threading.Thread | None = None
        self._closed = threading.Event()

    def run(self, action: Callable[[Index], T]) -> T:
        """Call `action` with the index; once more after a rebuild, or after the reserve was given back.

        Raises:
            TierUnavailableError: the index is busy, or broken again after a rebuild.
            WriteLostError: the disk is full or read-only.
            OSError: of a file that `action` wrote.
        """
        problem: IndexProblem = IndexBrokenError("never ran")
        for _ in range(2):
            try:
                result = action(self.index)
                self.trouble = ""
                return result
            except IndexProblem as error:
                problem = error
            if not self._mend(problem):
                break
        self.trouble = f"index: {problem}"
        if isinstance(problem, (IndexFullError, IndexReadOnlyError)):
            raise WriteLostError(self._tier, self.trouble) from problem
        raise TierUnavailableError(self._tier, self.trouble) from problem

    def complete(self, *, wait_s: float = SETTLE_WAIT_S) -> bool:
        """Tell whether the index knows all files. After a rebuild it does not: they are then read in by a
        thread of its own, which is waited for a little.

        Raises: as `run`.
        """
        if self.run(lambda index: index.database.is_complete()):
            return True
        with self._lock:
            if self._reader is None or not self._reader.is_alive():
                self._reader = threading.Thread(target=self._read_in, name="store-reader", daemon=True)
                self._reader.start()
            reader = self._reader
        reader.join(wait_s)
        return self.run(lambda index: index.database.is_complete())

    def reconcile(self, *, gently: bool = False) -> Reconciled:
        """Look for damage in the database, mend the index from the files, sweep leftovers.

        gently: rest as long as it works, so that the server's threads get their turns (100,000 entries: half
        a minute).
        Raises: as `run`; TierUnavailableError also when `close` was called meanwhile.
        """
        with self._reading:
            self.run(lambda index: index.database.verify())
            return self._reconcile(gently)

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        """End what runs in the background, and close the database."""
        self._closed.set()
        if self._reader is not None:
            self._reader.join()
        self.index.close()

    def _read_in(self) -> None:
        try:
            with self._reading:
                if not self.run(lambda index: index.database.is_complete()):
                    self._reconcile(gently=False)
        except (TierError, OSError) as error:
            log.warning("files not read in", extra={"reason": str(error)})
        finally:
            self.index.database.release()

    def _reconcile(self, gently: bool) -> Reconciled:
        worked_since_s = time.monotonic()

        def pause() -> None:
            nonlocal worked_since_s
            if gently:
                self._closed.wait(min(time.monotonic() - worked_since_s, 0.2))
            worked_since_s = time.monotonic()
            if self._closed.is_set():
                raise TierUnavailableError(self._tier, "closed")

        done = self.run(lambda index: reconcile(self._folder, index, now_s=self._now_s(), pause=pause))
        self.run(lambda index: index.database.set_complete())
        counts = {"adopted": done.adopted, "forgotten": done.forgotten, "temps": done.temps}
        log.info("store reconciled", extra=counts)
        return done

    def _mend(self, problem: IndexProblem) -> bool:
        """Do what lets the call be tried again; tell whether there is hope."""
        if isinstance(problem, IndexFullError):
            self._folder.free_reserve()
            return True
        if isinstance(problem, (IndexBusyError, IndexReadOnlyError)):
            return False
        log.warning("index rebuilt from the files", extra={"reason": str(problem)})
        try:
            if self.index.database.rebuild():
                self.rebuilds += 1
            return True
        except IndexProblem:
            return False
        except OSError as error:
            if error.errno in FULL_ERRNOS:
                self._folder.free_reserve()
            return False
