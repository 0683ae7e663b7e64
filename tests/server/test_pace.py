"""Who sends too slowly is cut off, whatever the pattern, and nobody else is."""

from __future__ import annotations

import asyncio

import pytest

from fuse_cache.proto.limits import CHUNK_BYTES, GRAPH_LIMITS
from fuse_cache.server.errors import DamagedUploadError
from fuse_cache.server.pace import MIN_BYTES_PER_S, PATIENCE_S, Pace


class Sender:
    """Sends chunks at given times, on a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.pace = Pace(now_s=lambda: self.now_s)

    async def send(self, after_s: float, size_bytes: int) -> None:
        async def arrive() -> None:
            if after_s > self.pace.left_s():
                await asyncio.sleep(60)  # For the clock of the test: too late.
            self.now_s += after_s

        await self.pace.wait(arrive())
        self.pace.received(size_bytes)


def test_a_byte_every_five_seconds_is_cut_off_with_the_second() -> None:
    sender = Sender()
    sender.pace.received(1)
    sender.now_s = 0.0
    sender.pace._waited_s = 4.9
    assert sender.pace.left_s() == pytest.approx(0.1, abs=0.01)


async def test_time_that_the_sender_is_not_waited_for_does_not_count() -> None:
    sender = Sender()
    await sender.send(1.0, CHUNK_BYTES)
    sender.now_s += 1000.0  # Our disk was slow.
    assert sender.pace.left_s() == pytest.approx(min(PATIENCE_S, 4.0 + CHUNK_BYTES / MIN_BYTES_PER_S))


async def test_whoever_keeps_the_pace_may_send_the_largest_graph_and_then_time_is_up() -> None:
    sender = Sender()
    for _ in range(GRAPH_LIMITS.size_bytes // CHUNK_BYTES):
        await sender.send(CHUNK_BYTES / MIN_BYTES_PER_S, CHUNK_BYTES)
    spent_s = GRAPH_LIMITS.size_bytes / MIN_BYTES_PER_S
    assert sender.pace._waited_s == pytest.approx(spent_s)
    assert sender.pace.left_s() == pytest.approx(PATIENCE_S)


async def test_silence_is_an_error_that_says_what_is_asked() -> None:
    pace = Pace(patience_s=0.05)
    with pytest.raises(DamagedUploadError, match="256 KiB/s"):
        await pace.wait(asyncio.sleep(60))
