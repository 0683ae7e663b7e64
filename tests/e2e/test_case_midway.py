"""Case 14: a compilation that dies midway leaves nothing; an entry that does not run is made again, once."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fuse_cache.client import report
from fuse_cache.client.client import Client, Obtained
from fuse_cache.client.verify import Want
from fuse_cache.proto import admin_pb2, admin_pb2_grpc
from fuse_cache.proto.artifact_pb2 import Manifest
from fuse_cache.proto.container import pack, unpack
from fuse_cache.proto.content import describe_content
from fuse_cache.proto.limits import CHUNK_BYTES
from fuse_cache.proto.trust import open_trust_folder
from tests.daemon import Daemon, running_daemon
from tests.e2e.conftest import MakeClient
from tests.e2e.mount import mounted
from tests.e2e.small import silu_graph
from tests.server.harness import CALL_S, until


def workers_of(daemon: Daemon) -> list[int]:
    """Return the processes that compile: each is a child of the fork server with a session of its own."""
    assert daemon.process is not None
    found = []
    for process in psutil.Process(daemon.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            parent = process.parent()
            forked = parent is not None and "forkserver" in " ".join(parent.cmdline())
            if forked and os.getsid(process.pid) == process.pid:
                found.append(process.pid)
    return found


def _interrupted(daemon: Daemon, client: Client, want: Want, delay_s: float) -> Obtained:
    """Ask, kill the compilation after `delay_s` of its life, and return what the host is told."""
    answers: list[Obtained] = []
    asking = threading.Thread(target=lambda: answers.extend(client.obtain([want])))
    asking.start()
    until(lambda: workers_of(daemon) or not asking.is_alive(), what="a worker")
    time.sleep(delay_s)
    for pid in workers_of(daemon):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    began_s = time.monotonic()
    asking.join(CALL_S)
    assert not asking.is_alive(), "the host waits for a dead compilation"
    assert time.monotonic() - began_s < 10
    return answers[0]


def _killed_again_and_again(
    daemon: Daemon, make_client: MakeClient, kills: int, label: str, rng: random.Random
) -> None:
    graph = silu_graph(1)
    began_s = time.monotonic()
    (first,) = make_client(daemon, namespace=f"{label}-first").obtain([graph.want()])
    assert first.artifact is not None
    whole_s = time.monotonic() - began_s
    died = 0
    for number in range(kills):
        client = make_client(daemon, host=f"{label}-{number}", namespace=f"{label}-{number}")
        told = _interrupted(daemon, client, graph.want(), rng.uniform(0, whole_s))
        if told.artifact is None:  # Else it was quicker.
            died += 1
            assert "WORKER_DIED" in str(told.error), told.error
        (again,) = client.obtain([graph.want()])
        assert again.artifact is not None, again.error
        assert graph.difference(again.artifact) <= 1e-5
        assert again.artifact.manifest.content.digest == first.artifact.manifest.content.digest
    assert died, "no compilation was hit: the test proves nothing"
    assert len([row for row in daemon.entries() if row["namespace"].startswith(label)]) == kills + 1
    assert not list((daemon.store / "temp").iterdir())


def test_a_killed_compilation_leaves_nothing_and_the_next_request_compiles(
    shared_daemon: Daemon, make_client: MakeClient
) -> None:
    _killed_again_and_again(shared_daemon, make_client, 2, "twice", random.Random(1))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_compilations_killed_at_random_points(shared_daemon: Daemon, make_client: MakeClient) -> None:
    _killed_again_and_again(shared_daemon, make_client, 10, "ten", random.Random(2))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_disk_that_is_full_while_compiling_is_no_reason_to_refuse_once_it_has_room(
    make_client: MakeClient, tmp_path: Path, trust_dir: Path
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    env = {"FUSE_CACHE_TRUST_DIR": str(trust_dir), "FUSE_CACHE_WORK_DIR": str(work)}
    graph = silu_graph(1)
    with (
        mounted(work, "-t", "tmpfs", "-o", "size=1g,mode=700", "tmpfs"),
        running_daemon(tmp_path / "daemon", "--workers", "1", env=env) as daemon,
    ):
        (first,) = make_client(daemon, namespace="room").obtain([graph.want()])  # Waits for the seed.
        assert first.artifact is not None, first.error
        told = ""
        for left_bytes in (0, 32 * 1024, 128 * 1024):  # Each runs full somewhere else.
            ballast = work / "ballast"
            free = os.statvfs(work)
            with ballast.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, free.f_bavail * free.f_frsize - left_bytes))
            client = make_client(daemon, host=f"full-{left_bytes}", namespace=f"full-{left_bytes}")
            (failed,) = client.obtain([graph.want()])
            told += str(failed.error or "")
            ballast.unlink()
            (again,) = client.obtain([graph.want()])
            assert again.artifact is not None, f"{left_bytes}: {again.error}"
            assert graph.difference(again.artifact) <= 1e-5
        # The worker says the first; the pool the second, of a worker whose log lay on that disk too.
        assert "No space left on device" in told or "are left on the disk" in told, (
            "no compilation met the full disk: the test proves nothing"
        )


def _plant(daemon: Daemon, trust_dir: Path, key: str) -> None:
    """Replace the content of an entry by one that loads and raises when it is called, validly signed."""
    channel = grpc.insecure_channel(daemon.endpoint, [("grpc.use_local_subchannel_pool", 1)])
    admin = admin_pb2_grpc.AdminStub(channel)
    shown = admin.Show(admin_pb2.ShowRequest(key_prefix=key), timeout=CALL_S)
    manifest = Manifest.FromString(shown.manifest.manifest)
    digest = manifest.content.digest.hex()
    stored = (daemon.store / "content" / digest[:2] / digest).read_bytes()
    sections = unpack(stored[-manifest.content.size_bytes :])
    source = sections["wrapper"].decode()
    assert source.count("        args.clear()\n") == 1
    sections["wrapper"] = source.replace(
        "        args.clear()\n", "        raise RuntimeError('planted: no such kernel')\n"
    ).encode()
    content = pack(sections)
    manifest.content.CopyFrom(describe_content(content))
    folder = open_trust_folder(environment={"FUSE_CACHE_TRUST_DIR": str(trust_dir)})
    signed = folder.signing_key().sign(manifest.SerializeToString())
    messages = [admin_pb2.ImportRequest(manifest=signed)]
    messages += [
        admin_pb2.ImportRequest(chunk=content[at : at + CHUNK_BYTES])
        for at in range(0, len(content), CHUNK_BYTES)
    ]
    assert admin.Import(iter(messages), timeout=CALL_S).entries == 1
    channel.close()


def test_an_entry_that_loads_but_throws_is_set_aside_after_the_report_and_rebuilt_once(
    shared_daemon: Daemon, trust_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's about itself, the first time that a process compiles here
        importlib.import_module("torch._inductor.compile_fx")
    x = torch.linspace(-3, 3, 24).reshape(4, 6)

    def function(x: Tensor) -> Tensor:
        return functional.silu(x) * 11 + 3

    def on_host(name: str) -> dict[str, object]:
        torch._dynamo.reset()
        options: Any = {
            "endpoint": shared_daemon.endpoint, "namespace": "planted", "cache_dir": str(tmp_path / name),
            "lookup_timeout_s": 5.0, "max_queue_s": 60.0,
        }  # fmt: skip
        compiled = torch.compile(function, backend="fuse_cache", fullgraph=True, options=options)
        before = len(report())
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), function(x))
        rows = report(json=True)[before:]
        return {"sources": [row["source"] for row in rows], "key": rows[0]["key"], "last": rows[-1]}

    first = on_host("first")
    assert first["sources"] == ["compiled"]
    key = str(first["key"])
    compiles = shared_daemon.stats()["compiles"]
    _plant(shared_daemon, trust_dir, key)

    hit = on_host("second")
    assert hit["sources"] == ["daemon", "local"]
    last = hit["last"]
    assert isinstance(last, dict)
    assert "planted: no such kernel" in last["reason"], "the first real error is the one shown"
    until(lambda: key not in {row["key"] for row in shared_daemon.entries()}, what="set aside")
    assert shared_daemon.stats()["bad_reports"] >= 1

    assert on_host("third")["sources"] == ["compiled"]
    assert on_host("fourth")["sources"] == ["daemon"]
    assert shared_daemon.stats()["compiles"] == compiles + 1
