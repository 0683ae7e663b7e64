"""Cases 1 and 13: many requests at the same instant, of one daemon that starts with nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

import pytest

from fuse_cache.proto.artifact_pb2 import Manifest
from fuse_cache.proto.content import verify_content
from fuse_cache.proto.signing import TrustSet, verify
from fuse_cache.proto.trust import open_trust_folder
from tests.daemon import Daemon
from tests.e2e import racer
from tests.e2e.conftest import MakeClient
from tests.e2e.small import silu_graph
from tests.server.harness import CALL_S, Piece, lookup

# An option that shows in the machine code: a multiplication and an addition become one operation.
CONTRACT = {"cpp.enable_floating_point_contract_flag": "fast"}
EXACT = 2e-6  # float32 of values up to about 30: one unit in the last place


def _rounds(daemon: Daemon, make_client: MakeClient, numbers: range, rounds: range, label: str) -> None:
    """Ask for all graphs at once, each round in a namespace of its own; in every other one has the option.

    Another one each time. It costs a precompiled header of its own, so not every graph gets it.
    """
    contents: defaultdict[tuple[int, bool], set[bytes]] = defaultdict(set)
    for round_ in rounds:
        chosen = 3 + (round_ // 2) % (numbers.stop - 3)
        options = [round_ % 2 == 0 and number == chosen for number in numbers]
        wants = [
            silu_graph(number).want(inductor=CONTRACT if option else None)
            for number, option in zip(numbers, options, strict=True)
        ]
        client = make_client(daemon, host=f"{label}-{round_}", namespace=f"{label}-{round_}")
        answers = client.obtain(wants)
        for number, option, want, answer in zip(numbers, options, wants, answers, strict=True):
            assert answer.artifact is not None, f"{number} {option}: {answer.error}"
            assert answer.source == "compiled"
            manifest = answer.artifact.manifest
            assert manifest.request_digest == want.request_digest
            fields = {field.name: field.value for field in manifest.key_fields}
            assert ("inductor_options.cpp.enable_floating_point_contract_flag" in fields) == option
            contents[number, option].add(manifest.content.digest)
            assert silu_graph(number).difference(answer.artifact) <= EXACT * 30, (number, option)
    for (number, option), digests in contents.items():
        assert len(digests) == 1, f"graph {number}, option {option}: {len(digests)} results for one request"
    with_option = [number for number, option in contents if option]
    assert with_option
    for number in with_option:  # From 3 on: x * 1 is x, and x * 2 is x + x, with nothing to contract.
        assert contents[number, True] != contents[number, False], f"graph {number}: the option is lost"


def test_graphs_at_the_same_instant_are_built_each_with_its_own_options(
    shared_daemon: Daemon, make_client: MakeClient
) -> None:
    _rounds(shared_daemon, make_client, range(3, 5), range(2), "few")


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_six_graphs_at_the_same_instant_for_twenty_rounds(
    shared_daemon: Daemon, make_client: MakeClient
) -> None:
    _rounds(shared_daemon, make_client, range(1, 7), range(20), "many")


class _Reader:
    """Looks one piece up again and again, and keeps the first thing that is not whole."""

    def __init__(self, daemon: Daemon, piece: Piece, trust_dir: Path) -> None:
        import grpc

        from fuse_cache.proto import compile_pb2_grpc

        folder = open_trust_folder(environment={"FUSE_CACHE_TRUST_DIR": str(trust_dir)})
        self._trusted = TrustSet(keys=frozenset(folder.trusted_keys()))
        self._channel = grpc.insecure_channel(daemon.endpoint, [("grpc.use_local_subchannel_pool", 1)])
        self._stub = compile_pb2_grpc.CompileStub(self._channel)
        self._piece = piece
        self._end = threading.Event()
        self.looks = self.found = 0
        self.problem: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._end.wait(0.005):
                (result,) = lookup(self._stub, self._piece).results
                self.looks += 1
                if result.found:
                    self.found += 1
                    manifest: Manifest = verify(result.manifest, self._trusted)
                    verify_content(manifest.content, result.inline_content)
        except Exception as error:
            self.problem = error

    def stop(self) -> None:
        self._end.set()
        self._thread.join(CALL_S)
        self._channel.close()
        assert self.problem is None, self.problem
        assert self.looks


def _race(daemon: Daemon, folder: Path, trust_dir: Path, rounds: int, label: str) -> None:
    """Eight processes, two hosts' worth of caches: the same graph at the same instant in each round."""
    want = silu_graph(1).want()
    job = folder / "want.json"
    job.write_text(json.dumps({"request": want.fields.encode().hex(), "graph": want.graph.hex()}))
    processes = [
        subprocess.Popen(
            [sys.executable, racer.__file__, daemon.endpoint, str(folder / f"host-{number % 2}"), str(job)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in range(8)
    ]  # fmt: skip
    entries_before = len(daemon.entries())
    try:
        for round_ in range(rounds):
            namespace = f"{label}-{round_}"
            reader = _Reader(daemon, Piece(want.graph, want.fields, namespace), trust_dir)
            for process in processes:
                assert process.stdin is not None
                process.stdin.write(namespace + "\n")
            for process in processes:  # Flushed one after the other: microseconds apart.
                assert process.stdin is not None
                process.stdin.flush()
            answers = []
            for process in processes:
                assert process.stdout is not None
                answers.append(json.loads(process.stdout.readline()))
            reader.stop()
            assert [answer["error"] for answer in answers] == [""] * 8
            assert len({answer["content"] for answer in answers}) == 1
            assert {answer["source"] for answer in answers} <= {"compiled", "daemon", "disk"}
    finally:
        for process in processes:
            process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0] * 8
    entries = [entry for entry in daemon.entries() if entry["namespace"].startswith(f"{label}-")]
    assert len(entries) == rounds
    assert len(daemon.entries()) == entries_before + rounds
    assert not list((daemon.store / "temp").iterdir())
    for host in ("host-0", "host-1"):
        files = [path for path in (folder / host).rglob("*") if path.is_file()]
        assert files
        assert not [path for path in files if "tmp" in path.name or path.name.startswith(".")], files


def test_eight_processes_on_a_cold_store_share_one_compilation(
    shared_daemon: Daemon, tmp_path: Path, trust_dir: Path
) -> None:
    compiles = shared_daemon.stats()["compiles"]
    _race(shared_daemon, tmp_path, trust_dir, rounds=2, label="race")
    assert shared_daemon.stats()["compiles"] == compiles + 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_eight_processes_on_a_cold_store_for_30_rounds(
    shared_daemon: Daemon, tmp_path: Path, trust_dir: Path
) -> None:
    compiles = shared_daemon.stats()["compiles"]
    _race(shared_daemon, tmp_path, trust_dir, rounds=30, label="races")
    assert shared_daemon.stats()["compiles"] == compiles + 30
