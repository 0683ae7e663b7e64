"""Wrappers: measured, verified, layered, bounded, and the memory tier's bound."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from fuse_cache.server.cache.bounded import BoundedTier, Breaker
from fuse_cache.server.cache.layered import LayeredTier
from fuse_cache.server.cache.measured import MeasuredTier
from fuse_cache.server.cache.memory import OVERHEAD_BYTES, MemoryTier
from fuse_cache.server.cache.tier import (
    CorruptEntryError,
    Entry,
    Meta,
    Space,
    TierUnavailableError,
    WriteLostError,
)
from fuse_cache.server.cache.verified import VerifiedTier, check_content, check_manifest
from tests.server.cache.artifacts import artifact
from tests.server.cache.fakes import SwitchTier

CHECKS = {Space.MANIFEST: check_manifest, Space.CONTENT: check_content}


def test_memory_stays_within_its_bytes_and_keeps_what_was_used_last() -> None:
    tier = MemoryTier(limit_bytes=10 * (1_000 + OVERHEAD_BYTES))
    made = [artifact(number) for number in range(30)]
    for one in made:
        tier.put(Space.CONTENT, one.digest, one.content_entry)
        tier.get(Space.CONTENT, made[0].digest)
        assert tier.usage().size_bytes <= 10 * (1_000 + OVERHEAD_BYTES)
    assert tier.contains(Space.CONTENT, made[0].digest)
    assert tier.contains(Space.CONTENT, made[29].digest)
    assert not tier.contains(Space.CONTENT, made[1].digest)
    assert tier.usage().evictions == 20


def test_memory_refuses_what_would_push_out_half_of_it() -> None:
    tier = MemoryTier(limit_bytes=100_000)
    artifact(1).put_into(tier)
    big = artifact(2, size_bytes=60_000)
    with pytest.raises(WriteLostError):
        tier.put(Space.CONTENT, big.digest, big.content_entry)
    assert tier.contains(Space.CONTENT, artifact(1).digest)


def test_hits_misses_outages_and_damage_are_counted_apart() -> None:
    slow = SwitchTier("disk")
    tier = MeasuredTier(VerifiedTier(slow, CHECKS))
    made = artifact(1)
    made.put_into(tier)
    tier.get(Space.MANIFEST, made.key)
    tier.get(Space.MANIFEST, artifact(2).key)
    slow.down = True
    with pytest.raises(TierUnavailableError):
        tier.get(Space.MANIFEST, made.key)
    slow.down = False
    slow.put(Space.MANIFEST, made.key, artifact(2).manifest_entry)
    with pytest.raises(CorruptEntryError):
        tier.get(Space.MANIFEST, made.key)
    assert tier.lookups() == {"hit": 1, "miss": 1, "unavailable": 1, "corrupt": 1}
    tier.get(Space.CONTENT, made.digest)
    assert tier.lookups()["hit"] == 1  # contents are not lookups
    tier.recount_as_miss(Space.MANIFEST)
    assert tier.lookups() == {"hit": 0, "miss": 2, "unavailable": 1, "corrupt": 1}


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (Entry(b"\xff\xff garbage", Meta(content=artifact(1).digest)), "not a manifest"),
        (artifact(2).manifest_entry, "another key"),
        (Entry(artifact(1).signed_manifest, artifact(2).meta), "another content"),
    ],
)
def test_a_manifest_that_is_not_its_keys_is_refused_and_set_aside(entry: Entry, reason: str) -> None:
    base = MemoryTier(limit_bytes=1 << 20)
    tier = VerifiedTier(base, CHECKS)
    base.put(Space.MANIFEST, artifact(1).key, entry)
    with pytest.raises(CorruptEntryError, match=reason):
        tier.get(Space.MANIFEST, artifact(1).key)
    assert tier.get(Space.MANIFEST, artifact(1).key) is None


def test_the_fast_tier_is_filled_on_the_way_back() -> None:
    fast, slow = MemoryTier(limit_bytes=1 << 20), SwitchTier()
    tier = LayeredTier(fast, slow)
    made = artifact(1)
    made.put_into(slow)
    first = tier.get(Space.MANIFEST, made.key)
    slow.down = True
    second = tier.get(Space.MANIFEST, made.key)
    assert first is not None
    assert second is not None
    assert (first.tier, second.tier) == ("slow", "memory")


def test_an_outage_of_one_level_is_no_outage_of_the_other() -> None:
    fast, slow = SwitchTier("fast"), SwitchTier("slow")
    tier = LayeredTier(fast, slow)
    made = artifact(1)
    made.put_into(tier)
    fast.down = True
    found = tier.get(Space.MANIFEST, made.key)
    assert found is not None
    assert found.tier == "slow"
    with pytest.raises(TierUnavailableError):
        tier.get(Space.MANIFEST, artifact(2).key)  # the fast one might have had it
    fast.down, slow.down = False, True
    found = tier.get(Space.MANIFEST, made.key)
    assert found is not None
    assert found.tier == "fast"
    with pytest.raises(TierUnavailableError):
        tier.get(Space.MANIFEST, artifact(2).key)


def test_a_put_that_the_slow_level_loses_is_served_by_the_fast_one_and_said() -> None:
    fast, slow = MemoryTier(limit_bytes=1 << 20), SwitchTier()
    tier = LayeredTier(fast, slow)
    slow.down = True
    made = artifact(1)
    with pytest.raises(TierUnavailableError):
        tier.put(Space.CONTENT, made.digest, made.content_entry)
    assert tier.get(Space.CONTENT, made.digest) is not None
    assert [stored.name for stored in tier.iterate(Space.CONTENT)] == [made.digest]


def test_a_hanging_tier_is_an_outage_within_the_bound() -> None:
    slow = SwitchTier()
    tier = BoundedTier(slow, get_timeout_s=0.05, breaker=Breaker(failures=3, open_s=60))
    made = artifact(1)
    made.put_into(tier)
    slow.go_on.clear()
    started_s = time.monotonic()
    for _ in range(3):
        with pytest.raises(TierUnavailableError, match="no answer"):
            tier.get(Space.MANIFEST, made.key)
    with pytest.raises(TierUnavailableError, match="not asked"):
        tier.get(Space.MANIFEST, made.key)
    assert time.monotonic() - started_s < 2.0
    assert "does not answer" in tier.health()
    slow.go_on.set()
    tier.close()


def test_calls_that_nobody_waits_for_any_more_are_not_made() -> None:
    slow = SwitchTier()
    tier = BoundedTier(slow, get_timeout_s=0.05, threads=1, breaker=Breaker(failures=100))
    slow.go_on.clear()
    for _ in range(5):
        with pytest.raises(TierUnavailableError):
            tier.get(Space.MANIFEST, artifact(1).key)
    slow.go_on.set()
    assert tier.get(Space.MANIFEST, artifact(1).key) is None
    assert slow.calls == 2  # the one that hung, and the last
    tier.close()


def test_damage_and_lost_writes_do_not_open_the_breaker() -> None:
    base = MemoryTier(limit_bytes=10_000, name="disk")
    tier = BoundedTier(VerifiedTier(base, CHECKS), breaker=Breaker(failures=1))
    big = artifact(1, size_bytes=50_000)
    for _ in range(3):
        with pytest.raises(WriteLostError):
            tier.put(Space.CONTENT, big.digest, big.content_entry)
        base.put(Space.MANIFEST, artifact(1).key, artifact(2).manifest_entry)
        with pytest.raises(CorruptEntryError):
            tier.get(Space.MANIFEST, artifact(1).key)
    assert tier.health() == ""
    tier.close()


def test_the_breaker_opens_probes_once_and_closes() -> None:
    clock = [0.0]
    breaker = Breaker(failures=2, open_s=5.0, now_s=lambda: clock[0])
    for _ in range(2):
        assert breaker.allow()
        breaker.failed()
    assert not breaker.allow()
    clock[0] = 5.0
    assert breaker.allow()
    assert not breaker.allow()  # one probe at a time
    breaker.failed()
    clock[0] = 9.0
    assert not breaker.allow()
    clock[0] = 10.0
    assert breaker.allow()
    breaker.succeeded()
    assert breaker.allow()
    assert breaker.allow()
    assert not breaker.is_open


def test_a_failure_between_successes_does_not_open_the_breaker() -> None:
    breaker = Breaker(failures=2)
    for _ in range(5):
        breaker.failed()
        breaker.succeeded()
    assert breaker.allow()


HANGING = """
import threading
from fuse_cache.server.cache.bounded import BoundedTier
from fuse_cache.server.cache.memory import MemoryTier
from fuse_cache.server.cache.tier import Space, TierUnavailableError
class Hanging(MemoryTier):
    def get(self, space, name):
        threading.Event().wait()
try:
    BoundedTier(Hanging(limit_bytes=1), get_timeout_s=0.05).get(Space.MANIFEST, bytes(32))
except TierUnavailableError:
    print("gave up")
"""


def test_a_hung_call_does_not_hold_up_the_end_of_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, timeout=30, check=True)
    assert done.stdout == b"gave up\n"


def test_many_threads_share_the_bounded_tier() -> None:
    tier = BoundedTier(SwitchTier(), threads=2)
    made = [artifact(number) for number in range(8)]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(20):
                made[number].put_into(tier)
                found = tier.get(Space.CONTENT, made[number].digest)
                assert found is not None
                assert found.data == made[number].content
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    tier.close()
