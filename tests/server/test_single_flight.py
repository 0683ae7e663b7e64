"""Case 17: many hosts, one key, one compilation; whoever asked first may go, and a failure is told to all."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from fuse_cache.proto import compile_pb2_grpc
from fuse_cache.proto.admin_pb2 import StatsRequest
from fuse_cache.proto.compile_pb2 import CompileEvent, ErrorReason, Priority
from tests.server.harness import (
    CALL_S,
    Call,
    FakeDaemon,
    Piece,
    compile_piece,
    fake_daemons,
    lookup,
    piece,
    reason_of,
    until,
)

HOSTS = 50


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDaemon]:
    yield from fake_daemons(tmp_path_factory.mktemp("daemon"), workers=1)


class Herd:
    """Hosts that ask for one piece at the same time, a connection each."""

    def __init__(self, daemon: FakeDaemon, wanted: Piece, hosts: int) -> None:
        self.last: list[CompileEvent] = []
        self.errors: list[grpc.RpcError] = []
        self._threads = [
            threading.Thread(target=self._ask, args=(daemon.stub(), wanted)) for _ in range(hosts)
        ]

    def _ask(self, stub: compile_pb2_grpc.CompileStub, wanted: Piece) -> None:
        try:
            self.last.append(compile_piece(stub, wanted))
        except grpc.RpcError as error:
            self.errors.append(error)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


def waiting(daemon: FakeDaemon) -> int:
    return int(daemon.admin().Stats(StatsRequest(), timeout=CALL_S).waiting)


def test_fifty_hosts_cause_one_compilation_and_share_it(daemon: FakeDaemon, tmp_path: Path) -> None:
    notes, gate = tmp_path / "notes", tmp_path / "gate"
    wanted = piece(f"note:{notes} wait:{gate}", number=1)
    herd = Herd(daemon, wanted, HOSTS)
    herd.start()
    admin = daemon.admin()
    until(lambda: admin.Stats(StatsRequest(), timeout=CALL_S).waiting == HOSTS)
    gate.touch()
    herd.join()
    assert not herd.errors
    assert len(notes.read_text().splitlines()) == 1
    assert len({event.done.manifest.manifest for event in herd.last}) == 1
    assert all(event.done.inline_content for event in herd.last)
    assert len(herd.last) == HOSTS
    assert waiting(daemon) == 0


def test_the_first_requester_may_die_while_it_compiles(daemon: FakeDaemon, tmp_path: Path) -> None:
    notes, gate = tmp_path / "notes", tmp_path / "gate"
    wanted = piece(f"note:{notes} wait:{gate}", number=2)
    first = Call(daemon.stub(), wanted.start)
    first.next_of("need_graph")
    first.send_graph(wanted.graph)
    first.next_of("compiling")
    herd = Herd(daemon, wanted, 3)
    herd.start()
    until(lambda: waiting(daemon) == 4)
    first.close()
    until(lambda: waiting(daemon) == 3)
    gate.touch()
    herd.join()
    assert Counter(event.WhichOneof("event") for event in herd.last) == {"done": 3}
    assert len(notes.read_text().splitlines()) == 1


def test_a_compilation_that_nobody_waits_for_any_more_is_finished_and_stored(
    daemon: FakeDaemon, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    wanted = piece(f"wait:{gate}", number=3)
    only = Call(daemon.stub(), wanted.start)
    only.next_of("need_graph")
    only.send_graph(wanted.graph)
    only.next_of("compiling")
    only.close()
    until(lambda: waiting(daemon) == 0)
    gate.touch()
    stub = daemon.stub()
    until(lambda: lookup(stub, wanted).results[0].found)


def test_a_requester_that_dies_before_it_sent_the_graph_is_replaced(daemon: FakeDaemon) -> None:
    wanted = piece(number=4)
    first = Call(daemon.stub(), wanted.start)
    first.next_of("need_graph")
    herd = Herd(daemon, wanted, 3)
    herd.start()
    until(lambda: waiting(daemon) == 4)
    assert not herd.last
    first.close()  # One of the others is asked for the graph now.
    herd.join()
    assert Counter(event.WhichOneof("event") for event in herd.last) == {"done": 3}


def test_a_requester_that_stops_sending_gives_way(daemon: FakeDaemon) -> None:
    wanted = piece(number=5)
    mute = Call(daemon.stub(), wanted.start)
    mute.next_of("need_graph")
    other = compile_piece(daemon.stub(), wanted)
    assert other.WhichOneof("event") == "done"
    with pytest.raises(grpc.RpcError) as caught:
        mute.next_of("done", "failed")
    assert reason_of(caught.value) == "DIGEST_MISMATCH"
    mute.close()


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("raise", ErrorReason.ERROR_REASON_COMPILE_FAILED),
        ("die", ErrorReason.ERROR_REASON_WORKER_DIED),
    ],
)
def test_a_failure_is_told_to_all_who_wait_and_is_no_result(
    daemon: FakeDaemon, tmp_path: Path, end: str, reason: int
) -> None:
    gate = tmp_path / "gate"
    wanted = piece(f"wait:{gate} {end}", number=6)
    herd = Herd(daemon, wanted, 8)
    herd.start()
    until(lambda: waiting(daemon) == 8)
    gate.touch()
    herd.join()
    assert [event.failed.reason for event in herd.last] == [reason] * 8
    assert not lookup(daemon.stub(), wanted).results[0].found


def test_a_host_goes_before_warm(daemon: FakeDaemon, tmp_path: Path) -> None:
    """One worker; it is busy, then a warm piece is queued, then one that a host waits for."""
    gate, notes = tmp_path / "gate", tmp_path / "notes"
    calls = []
    for number, (priority, script) in enumerate(
        [
            (Priority.PRIORITY_HOST, f"wait:{gate}"),
            (Priority.PRIORITY_WARM, f"order:{notes}:warm"),
            (Priority.PRIORITY_HOST, f"order:{notes}:host"),
        ]
    ):
        wanted = piece(script, number=10 + number)
        start = wanted.start
        start.priority = priority
        call = Call(daemon.stub(), start)
        call.next_of("need_graph")
        call.send_graph(wanted.graph)
        call.next_of("compiling" if number == 0 else "queued")
        calls.append(call)
    until(lambda: calls[1].next_of("queued").queued.position == 1)
    gate.touch()
    for call in calls:
        call.next_of("done")
        call.close()
    assert notes.read_text().split() == ["host", "warm"]
