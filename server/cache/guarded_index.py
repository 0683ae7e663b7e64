"""The index as the disk tier uses it: damage is rebuilt, a full disk gets the reserve, the rest is one of the
tier's errors.
"""

from __future__ import annotations

import logging
import threading
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
from fuse_cache.server.cache.tier import TierUnavailableError, WriteLostError

log = logging.getLogger(__name__)
T = TypeVar("T")


class GuardedIndex:
    """Runs index calls and mends what stops them. Safe for threads."""

    def __init__(self, folder: Folder, *, tier: str, now_s: Callable[[], float]) -> None:
        self.index = Index(folder.root)
        self.rebuilds = 0
        self.trouble = ""  # why the last call failed, "" since one worked
        self._folder = folder
        self._tier = tier
        self._now_s = now_s
        self._settling = threading.Lock()  # One thread reads the files in at a time. Held during I/O.

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

    def settle(self) -> None:
        """Read the files in, if that is still owed after a rebuild or a lost database: before it, sizes are
        wrong.

        Raises: as `run`.
        """
        if not self.run(lambda index: index.database.is_complete()):
            with self._settling:
                if not self.run(lambda index: index.database.is_complete()):
                    self._reconcile(lambda: None)

    def reconcile(self, pause: Callable[[], None]) -> Reconciled:
        """Look for damage in the database, mend the index from the files, sweep leftovers.

        Raises: as `run`.
        """
        with self._settling:
            self.run(lambda index: index.database.verify())
            return self._reconcile(pause)

    def _reconcile(self, pause: Callable[[], None]) -> Reconciled:
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
