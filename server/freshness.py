"""Notices that the disk no longer holds what this daemon's keys say, and makes a new epoch of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from fuse_cache.server.epoch import Epoch, EpochError, Sources, take_epoch, take_stamps

log = logging.getLogger(__name__)

PERIOD_S = 5.0  # Between two looks while nobody compiles; every compilation looks before and after.


class Freshness:
    """Holds the current epoch. `look` is cheap while nothing changes: 200 calls of stat in a thread."""

    def __init__(self, sources: Sources, *, on_change: Callable[[], None]) -> None:
        """Start from what was found. `on_change` is called when workers must load anew."""
        self.epoch = sources.epoch
        self.problem = ""  # Why this daemon should be restarted or reinstalled; shown as DEGRADED.
        self._stamps = sources.stamps
        self._started_with = sources.stamps.own
        self._interpreter = sources.interpreter
        self._memo = sources.memo
        self._on_change = on_change
        self._lock = asyncio.Lock()  # One look at a time.
        self._looked_s = float("-inf")  # When the last look began.

    async def look(self, *, within_s: float = 0.0) -> Epoch:
        """Return the epoch of what is on the disk now, or was at most `within_s` seconds ago.

        One that cannot be told (an upgrade is under way) leaves the last one, and a problem.
        """
        asked_s = time.monotonic() - within_s
        async with self._lock:
            # Whoever waited for another's look that began after he asked needs none of his own.
            if self._looked_s < asked_s:
                began_s = time.monotonic()
                await self._look()
                self._looked_s = began_s
        return self.epoch

    async def _look(self) -> None:
        try:
            stamps = await asyncio.to_thread(take_stamps, self._interpreter, op_modules=self.epoch.op_modules)
            if stamps != self._stamps:
                epoch = await asyncio.to_thread(
                    take_epoch, stamps, self._interpreter, op_modules=self.epoch.op_modules, memo=self._memo
                )
                self._stamps = stamps
                log.warning("sources changed", extra={"epoch": epoch.name, "was": self.epoch.name})
                self.epoch = epoch
                # Whatever it was: workers load proto/ too, and one that is loaded is of the old epoch.
                self._on_change()
        except (EpochError, OSError, ValueError) as error:
            self.problem = str(error)
        else:
            changed = stamps.own != self._started_with
            self.problem = "this daemon's own code changed on disk: restart it" if changed else ""

    async def watch(self) -> None:
        """Look again and again, until cancelled."""
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(PERIOD_S)
                await self.look(within_s=PERIOD_S)
