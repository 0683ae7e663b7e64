"""How slowly a sender may send: whoever uploads holds something that others wait for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fuse_cache.server.errors import DamagedUploadError

T = TypeVar("T")

PATIENCE_S = 5.0  # Without a byte; and what a sender may be behind the pace altogether.
# A sixteenth of what gigabit Ethernet carries between two continents. The largest graph, 8 MiB, has 37 s with
# it, and one byte every 4.9 s is cut off with the second byte.
MIN_BYTES_PER_S = 256 * 1024


class Pace:
    """The clock of one upload. Only time in which the sender is waited for counts, not what we do ourselves.

    A sender may be silent for `patience_s` seconds, and may in all take `patience_s` seconds and the time
    that its bytes need at `bytes_per_s`.
    """

    def __init__(
        self,
        *,
        patience_s: float | None = None,
        bytes_per_s: float | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the clock; None: the constants of this module."""
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self._bytes_per_s = MIN_BYTES_PER_S if bytes_per_s is None else bytes_per_s
        self._now_s = now_s
        self._waited_s = 0.0
        self._received_bytes = 0

    def left_s(self) -> float:
        """Return how long the next bytes may take."""
        budget_s = self._patience_s + self._received_bytes / self._bytes_per_s - self._waited_s
        return max(0.0, min(self._patience_s, budget_s))

    def received(self, size_bytes: int) -> None:
        """Note that so many bytes came."""
        self._received_bytes += size_bytes

    async def wait(self, waiting: Awaitable[T]) -> T:
        """Wait for the sender.

        Raises:
            DamagedUploadError: it is too slow; others get their turn.
        """
        left_s, began_s = self.left_s(), self._now_s()
        try:
            async with asyncio.timeout(left_s):
                return await waiting
        except TimeoutError as error:
            raise DamagedUploadError(
                "DIGEST_MISMATCH",
                f"too slow: {self._received_bytes} bytes came; send at least "
                f"{self._bytes_per_s / 1024:.0f} KiB/s, and something every {self._patience_s:g} s",
            ) from error
        finally:
            self._waited_s += self._now_s() - began_s
