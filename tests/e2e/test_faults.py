"""A daemon that is absent, deaf, stopped or killed: the host has a right answer of its own, within the bound,
and says why."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fuse_cache.client.channel import CONNECT_CAP_S
from tests import fakes
from tests.daemon import Daemon, running_daemon
from tests.e2e import small_host

pytestmark = pytest.mark.apart

BOUND_FACTOR = 4  # Tests that hold a time bound allow four times of it.
NO_LIFE_S, SILENCE_S = 0.25, 5.0


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon of the test's own, which it may stop or kill."""
    with running_daemon(tmp_path / "daemon") as running:
        yield running
        running.kill()


@pytest.fixture(scope="module")
def inductor(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A compiler's folder that all hosts here share: in an empty one the first compilation takes 15 s."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor"))}


def _until(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


def _compiles(daemon: Daemon) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{daemon.http_port}/metrics", timeout=10) as answer:
        found = re.search(r"^fuse_cache_compiles_total (\S+)$", answer.read().decode(), re.MULTILINE)
    return int(float(found[1])) if found else 0


def _only_local(outcome: dict[str, Any]) -> dict[str, Any]:
    """Return the one report of a run that had to compile here."""
    assert outcome["worst"] < 1e-5
    (graph,) = outcome["graphs"]
    assert (graph["source"], graph["used"]) == ("local", True)
    return graph  # type: ignore[no-any-return]  # JSON


def _patient(daemon: Daemon) -> dict[str, Any]:
    # The fork server may still be loading torch: a queue is not what these tests are about.
    return {"endpoint": daemon.endpoint, "max_queue_s": 300}


def test_an_absent_daemon_costs_next_to_nothing(tmp_path: Path, inductor: dict[str, str]) -> None:
    options = {"endpoint": f"unix:{tmp_path}/nobody.sock"}
    graph = _only_local(small_host.run("one_size", options, tmp_path / "host", inductor))
    assert graph["reason"].startswith("no daemon: no daemon at unix:")
    assert graph["lookup_seconds"] < NO_LIFE_S * BOUND_FACTOR


def test_a_deaf_daemon_costs_a_quarter_of_a_second_of_an_idle_machine(
    tmp_path: Path, inductor: dict[str, str]
) -> None:
    with fakes.deaf_listener() as address:
        graph = _only_local(small_host.run("one_size", {"endpoint": address}, tmp_path / "host", inductor))
    assert "no sign of life" in graph["reason"]
    # Waiting counts less where others want the cores too, up to this bound.
    assert graph["lookup_seconds"] < max(NO_LIFE_S * BOUND_FACTOR, CONNECT_CAP_S + 1)


@pytest.mark.slow
def test_a_daemon_that_stops_while_it_compiles_is_left_when_it_falls_silent(
    daemon: Daemon, tmp_path: Path, inductor: dict[str, str]
) -> None:
    host = small_host.start("one_size", _patient(daemon), tmp_path / "host", {**daemon.env, **inductor})
    _until(lambda: _compiles(daemon) > 0, "a compilation begins", 120)
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    graph = _only_local(small_host.finish(host))
    assert re.search("silent for 5 s|no sign of life", graph["reason"])
    # Silence, then one attempt to attach again; the rest is the local compile, which this cannot tell apart.
    assert time.monotonic() - stopped < (SILENCE_S + NO_LIFE_S) * BOUND_FACTOR + 60


@pytest.mark.slow
def test_a_daemon_that_is_killed_while_it_compiles_is_left_at_once(
    daemon: Daemon, tmp_path: Path, inductor: dict[str, str]
) -> None:
    host = small_host.start("one_size", _patient(daemon), tmp_path / "host", {**daemon.env, **inductor})
    _until(lambda: _compiles(daemon) > 0, "a compilation begins", 120)
    daemon.kill()
    graph = _only_local(small_host.finish(host))
    assert graph["reason"].startswith("no daemon: ")


def test_a_daemon_that_is_killed_while_it_streams_is_left_at_once(
    tmp_path: Path, inductor: dict[str, str]
) -> None:
    trust, address = tmp_path / "trust", f"unix:{tmp_path}/fake.sock"
    streaming = subprocess.Popen([sys.executable, "-m", "tests.fakes", address, str(trust)], cwd=_root())
    try:
        _until(Path(f"{trust}.pid").exists, "the fake daemon serves")
        env = {"FUSE_CACHE_TRUST_DIR": str(trust), **inductor}
        host = small_host.start("one_size", {"endpoint": address}, tmp_path / "host", env)
        _until(Path(f"{trust}.fetching").exists, "content is being streamed")
    finally:
        streaming.kill()
        streaming.wait()
    killed = time.monotonic()
    graph = _only_local(small_host.finish(host))
    assert graph["reason"].startswith("no daemon: ")
    assert time.monotonic() - killed < SILENCE_S * BOUND_FACTOR + 60


def _root() -> Path:
    return Path(__file__).parents[2]
