"""From a request to verified bytes, against a daemon of our own making."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import pytest

from fuse_cache.client import channel
from fuse_cache.client.client import Client
from fuse_cache.client.epochs import epoch_for
from fuse_cache.client.errors import ArtifactRejectedError, DaemonRefusedError, DaemonUnavailableError
from fuse_cache.client.options import CompileOptions
from fuse_cache.proto import compile_pb2 as wire
from fuse_cache.proto.request import Range
from fuse_cache.proto.signing import SigningKey
from fuse_cache.proto.toolchain import local_toolchain
from tests.client.conftest import MakeClient
from tests.fakes import FakeDaemon, deaf_listener, make_want, serving

pytestmark = pytest.mark.apart

BOUND_FACTOR = 4  # Tests that hold a time bound allow four times of it.


def test_what_is_compiled_once_comes_from_every_nearer_tier_later(
    daemon: FakeDaemon, endpoint: str, make_client: MakeClient
) -> None:
    want = make_want()
    first = make_client(endpoint)
    assert [answer.source for answer in first.obtain([want])] == ["compiled"]
    assert daemon.uploaded == [want.graph]
    assert first.obtain([want])[0].source == "memory"
    again = make_client(endpoint)
    (answer,) = again.obtain([want])
    assert answer.source == "disk"
    assert answer.artifact is not None
    assert answer.artifact.content == daemon.content
    assert make_client(endpoint, "another host").obtain([want])[0].source == "daemon"
    assert daemon.calls["Compile"] == 1
    assert daemon.calls["Lookup"] == 2


def test_a_hit_of_the_own_tiers_costs_no_call_at_all(
    daemon: FakeDaemon, endpoint: str, make_client: MakeClient
) -> None:
    want = make_want()
    make_client(endpoint).obtain([want])
    before = daemon.calls.total()
    assert make_client(endpoint).obtain([want])[0].source == "disk"
    assert daemon.calls.total() == before


def test_a_batch_is_looked_up_in_one_call_and_answered_in_order(
    daemon: FakeDaemon, endpoint: str, make_client: MakeClient
) -> None:
    wants = [make_want(bytes([number])) for number in range(5)]
    for number in (1, 3):
        daemon.put(wants[number], b"stored %d" % number)
    answers = make_client(endpoint).obtain(wants)
    assert [answer.source for answer in answers] == ["compiled", "daemon", "compiled", "daemon", "compiled"]
    assert [a.artifact.content for a in answers if a.artifact and a.source == "daemon"] == [
        b"stored 1",
        b"stored 3",
    ]
    assert daemon.calls["Lookup"] == 1


def test_large_content_is_fetched_and_a_cut_is_resumed_where_it_happened(
    daemon: FakeDaemon, endpoint: str, make_client: MakeClient
) -> None:
    want, content = make_want(), bytes(range(256)) * 4096 * 3  # 3 MiB: six chunks
    daemon.put(want, content)
    daemon.inline = False
    daemon.cut_fetch_after = 2
    (answer,) = make_client(endpoint).obtain([want])
    assert answer.artifact is not None
    assert answer.artifact.content == content
    assert daemon.offsets == [0, 2 * 512 * 1024]


def test_content_that_was_evicted_between_lookup_and_fetch_is_compiled(
    daemon: FakeDaemon, endpoint: str, make_client: MakeClient
) -> None:
    want = make_want()
    daemon.put(want, b"soon gone")
    daemon.contents.clear()
    daemon.inline = False
    assert make_client(endpoint).obtain([want])[0].source == "compiled"


def test_two_validly_signed_entries_swapped_under_each_others_key_are_refused_and_compiled(
    daemon: FakeDaemon, endpoint: str, make_client: MakeClient
) -> None:
    one, two = make_want(b"one"), make_want(b"two")
    daemon.put(one, b"content one")
    daemon.put(two, b"content two")
    entries = daemon.entries
    daemon.entries = {
        one.request_digest: entries[two.request_digest],
        two.request_digest: entries[one.request_digest],
    }
    answers = make_client(endpoint).obtain([one, two])
    for want, answer in zip((one, two), answers, strict=True):
        assert answer.source == "compiled"
        assert [error.verdict for error in answer.rejected] == ["WRONG_MANIFEST"]
        assert answer.artifact is not None
        assert answer.artifact.manifest.graph_digest == want.fields.graph_digest
    assert {item.verdict for item in daemon.reports} == {wire.VERDICT_WRONG_MANIFEST}


WRONG: dict[str, dict[str, Any]] = {
    "namespace": {"namespace": "another"},
    "graph": {"graph_digest": bytes(32)},
    "pass config": {"pass_config_hash": bytes(32)},
    "target": {"target": "cpu-avx512"},
    "request": {"request_digest": bytes(32)},
    "range": {"range": {"lower": 1, "upper": 2, "symbol_plus_one": 1}},
    "tuned build": {"revision": 2},
    "toolchain": {"toolchain": {"torch": "2.11.0"}},
    "CPU wheel": {"cpu_wheel_build": True},
}


@pytest.mark.parametrize("field", WRONG)
def test_a_manifest_that_differs_from_the_request_in_one_field_is_refused(
    field: str, daemon: FakeDaemon, endpoint: str, make_client: MakeClient
) -> None:
    want = make_want()
    daemon.put(want, b"stored", **WRONG[field])
    (answer,) = make_client(endpoint).obtain([want])
    assert [error.verdict for error in answer.rejected] == ["WRONG_MANIFEST"]
    assert answer.source == "compiled"


def test_a_signature_of_nobody_we_trust_is_refused_even_after_the_daemon_compiled(
    daemon: FakeDaemon, endpoint: str, make_client: MakeClient
) -> None:
    daemon.key = SigningKey.generate()
    (answer,) = make_client(endpoint).obtain([make_want()])
    assert answer.artifact is None
    assert isinstance(answer.error, ArtifactRejectedError)
    assert answer.error.verdict == "BAD_SIGNATURE"


def test_content_that_does_not_fit_its_digest_is_refused_and_compiled(
    daemon: FakeDaemon, endpoint: str, make_client: MakeClient
) -> None:
    want = make_want()
    daemon.put(want, b"the right content")
    digest = next(iter(daemon.contents))
    daemon.contents[digest] = b"the wrong content"
    (answer,) = make_client(endpoint).obtain([want])
    assert [error.verdict for error in answer.rejected] == ["BAD_DIGEST"]
    assert answer.source == "compiled"


def test_an_unsigned_manifest_is_taken_only_where_that_was_said_aloud(
    daemon: FakeDaemon, endpoint: str, make_client: MakeClient
) -> None:
    want = make_want()
    signed = daemon.put(want, b"unsigned content")
    signed.ClearField("signature")
    assert make_client(endpoint, "aloud", allow_unsigned=True).obtain([want])[0].source == "daemon"
    (answer,) = make_client(endpoint, "careful").obtain([want])
    assert [error.verdict for error in answer.rejected] == ["BAD_SIGNATURE"]


def test_an_artifact_for_a_larger_range_serves_a_smaller_one_where_that_was_allowed(
    daemon: FakeDaemon, endpoint: str, make_client: MakeClient
) -> None:
    large = make_want(compile_range=Range(symbol=0, lower=1, upper=2048))
    small = make_want(compile_range=Range(symbol=0, lower=1, upper=512), allow_covering=True)
    daemon.put(large, b"for all sizes")
    daemon.entries[small.request_digest] = daemon.entries[large.request_digest]
    (answer,) = make_client(endpoint).obtain([small])
    assert answer.source == "daemon"
    strict = make_want(compile_range=Range(symbol=0, lower=1, upper=512))
    (answer,) = make_client(endpoint, "strict host").obtain([strict])
    assert [error.verdict for error in answer.rejected] == ["WRONG_MANIFEST"]
    static = make_want(compile_range=Range(symbol=0, lower=512, upper=512), allow_covering=True)
    daemon.put(large, b"for all sizes")
    daemon.entries[static.request_digest] = daemon.entries[large.request_digest]
    (answer,) = make_client(endpoint, "static host").obtain([static])
    assert [error.verdict for error in answer.rejected] == ["WRONG_MANIFEST"]


def test_a_new_epoch_makes_own_entries_misses(
    daemon: FakeDaemon, endpoint: str, make_client: MakeClient
) -> None:
    want = make_want()
    client = make_client(endpoint)
    client.obtain([want])
    daemon.epoch = "epoch-2"
    daemon.entries.clear()
    client.obtain([make_want(b"another")])  # Any lookup tells of the new epoch.
    assert client.obtain([want])[0].source == "compiled"


def test_a_recalled_builder_is_refused_in_memory_on_disk_and_from_the_daemon(
    daemon: FakeDaemon, endpoint: str, make_client: MakeClient
) -> None:
    want = make_want()
    client = make_client(endpoint)
    client.obtain([want])
    daemon.revoked, daemon.revocations_version = [daemon.key.builder], 1
    client.obtain([make_want(b"another")])
    for host in (client, make_client(endpoint)):
        (answer,) = host.obtain([want])
        assert answer.artifact is None
        assert isinstance(answer.error, ArtifactRejectedError)
        assert "recalled" in str(answer.error)


def test_the_last_known_epoch_serves_own_entries_while_the_daemon_is_away(
    daemon: FakeDaemon, tmp_path: Any, make_client: MakeClient
) -> None:
    want = make_want()
    with serving(daemon, f"unix:{tmp_path}/away.sock") as address:
        make_client(address).obtain([want])
    later = make_client(address)
    later.epochs._now_s = lambda: time.time() + 3600  # The knowledge is stale, and nobody is there to ask.
    assert later.obtain([want])[0].source == "disk"
    (answer,) = make_client(address).obtain([make_want(b"another")])
    assert isinstance(answer.error, DaemonUnavailableError)


def test_a_compilation_queued_for_longer_than_the_bound_is_left(
    daemon: FakeDaemon, endpoint: str, make_client: MakeClient
) -> None:
    daemon.script = "queued:200 done"
    (answer,) = make_client(endpoint, max_queue_s=0.2).obtain([make_want()])
    assert isinstance(answer.error, DaemonRefusedError)
    assert answer.error.reason == "QUEUE_FULL"
    assert "max_queue_s" in str(answer.error)


def test_a_failed_compilation_is_an_answer_that_carries_its_reason(
    daemon: FakeDaemon, endpoint: str, make_client: MakeClient
) -> None:
    daemon.script = "compiling:1 fail:NOT_CACHEABLE"
    (answer,) = make_client(endpoint).obtain([make_want()])
    assert isinstance(answer.error, DaemonRefusedError)
    assert (answer.error.reason, answer.error.message) == ("NOT_CACHEABLE", "it said no")


def test_a_cut_compilation_is_attached_to_again(
    daemon: FakeDaemon, endpoint: str, make_client: MakeClient
) -> None:
    daemon.script = "compiling:2 cut"
    (answer,) = make_client(endpoint).obtain([make_want()])
    assert answer.source == "compiled"
    assert daemon.calls["Wait"] == 1


def test_a_compilation_that_falls_silent_is_left_and_not_asked_for_again(
    daemon: FakeDaemon, endpoint: str, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompileOptions, "silence_bound_s", 0.3)
    daemon.script = "compiling:1 silent"
    (answer,) = make_client(endpoint).obtain([make_want()])
    assert "silent for 0.3 s" in str(answer.error)
    assert (daemon.calls["Compile"], daemon.calls["Wait"]) == (1, 0)


def test_a_compilation_gets_compile_timeout_s_once_and_is_no_outage_after_that(
    daemon: FakeDaemon, endpoint: str, make_client: MakeClient
) -> None:
    daemon.script = "compiling:200 done"
    client = make_client(endpoint, compile_timeout_s=0.4)
    (answer,) = client.obtain([make_want()])
    assert "no result in time" in str(answer.error)
    assert (daemon.calls["Compile"], daemon.calls["Wait"]) == (1, 0)
    assert client.transport.endpoints[0].breaker._failures == 0


def test_a_used_artifact_is_reported_in_the_background(
    daemon: FakeDaemon, endpoint: str, make_client: MakeClient
) -> None:
    client = make_client(endpoint)
    (answer,) = client.obtain([make_want()])
    assert answer.artifact is not None
    client.used(answer.artifact)
    client.used(answer.artifact)
    assert client.reporter.flush(5)
    assert [(item.verdict, item.count) for item in daemon.reports] == [(wire.VERDICT_USED, 2)]


def test_a_deaf_daemon_costs_the_bound_and_after_three_times_next_to_nothing(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_share_of_cores", lambda: 1.0)  # However busy the machine of the test is.
    with deaf_listener() as address:
        client = make_client(address)
        for _ in range(3):
            began = time.monotonic()
            (answer,) = client.obtain([make_want()])
            assert isinstance(answer.error, DaemonUnavailableError)
            assert time.monotonic() - began < 0.25 * BOUND_FACTOR
        began = time.monotonic()
        for _ in range(10):
            client.obtain([make_want()])
        assert (time.monotonic() - began) / 10 < 0.001 * BOUND_FACTOR


def test_on_a_busy_machine_waiting_counts_less_and_is_bounded_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel, "CONNECT_CAP_S", 0.6)
    for share, least, most in ((1.0, 0.05, 0.3), (0.25, 0.2, 0.6), (0.001, 0.6, 0.6)):
        monkeypatch.setattr(channel, "_share_of_cores", lambda share=share: share)
        began = time.monotonic()
        channel._wait(threading.Event(), 0.05)
        assert least <= time.monotonic() - began < most * BOUND_FACTOR


def test_a_daemon_that_comes_back_is_noticed(
    daemon: FakeDaemon, tmp_path: Any, make_client: MakeClient
) -> None:
    address = f"unix:{tmp_path}/late.sock"
    client = make_client(address)
    for _ in range(4):
        client.obtain([make_want()])
    assert client.transport.endpoints[0].breaker.is_open
    with serving(daemon, address):
        end = time.monotonic() + 10
        while client.obtain([make_want()])[0].source != "compiled":
            assert time.monotonic() < end
            time.sleep(0.05)
    assert not client.transport.endpoints[0].breaker.is_open


def test_a_second_endpoint_answers_where_the_first_is_gone(
    daemon: FakeDaemon, endpoint: str, tmp_path: Any, make_client: MakeClient
) -> None:
    client = make_client([f"unix:{tmp_path}/nobody.sock", endpoint])
    assert client.obtain([make_want()])[0].source == "compiled"


@pytest.mark.parametrize("allowed", [False, True])
def test_the_daemon_is_told_whether_another_wheel_will_do(allowed: bool) -> None:
    client = Client(CompileOptions.from_mapping({"allow_cpu_wheel_builds": allowed}))
    want = make_want()
    assert client.lookup_request([want]).allow_cpu_wheel_builds is allowed
    assert client.compile_start(want).allow_cpu_wheel_builds is allowed


def test_the_epoch_is_that_of_the_toolchain_that_serves_this_host() -> None:
    mine = local_toolchain()
    other_python = dataclasses.replace(mine, python="3.99", torch_fingerprint=b"o" * 32)
    stranger = dataclasses.replace(mine, torch="1.0", torch_fingerprint=b"s" * 32)
    offers = {
        name: wire.ToolchainOffer(toolchain=toolchain.to_message(), epoch=name)
        for name, toolchain in (("mine", mine), ("other", other_python), ("stranger", stranger))
    }

    def epoch(*names: str) -> str:
        return epoch_for(mine, [offers[name] for name in names], any_wheel=False)

    assert epoch("stranger", "other", "mine") == "mine"
    assert epoch("stranger", "other") == "other", "for GPUs it serves this host, whatever its Python"
    assert epoch("stranger") == "stranger"
    assert epoch() == ""
