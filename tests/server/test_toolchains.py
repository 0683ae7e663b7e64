"""A daemon with two toolchains: who builds for whom, when its workers are loaded, and what its start refuses.

The second one is this very Python behind a script, with another torch by its papers: what tells toolchains
apart is what the disk says, and nothing here loads torch.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from fuse_cache.proto.artifact_pb2 import Manifest
from fuse_cache.proto.compile_pb2 import CapabilitiesRequest, CompileEvent, CompileStart, LookupRequest
from fuse_cache.proto.toolchain import Toolchain, installed_toolchain, local_toolchain
from tests.server.harness import CALL_S, Call, FakeDaemon, Piece, copy_sources, piece, reason_of, until

VERSION = "2.11.7+other"


def other_python(folder: Path, *, same_release: bool = False) -> tuple[Path, Toolchain]:
    """Return a Python that has another torch by its papers, and what it has: another release, or another
    wheel of the one that is here."""
    record, version = "torch/version.py,sha256=x,1\n", VERSION
    if same_release:
        found = importlib.metadata.distribution("torch").read_text("RECORD")
        assert found is not None
        record = found + "torch/lib/libother.so,sha256=x,1\n"
        version = local_toolchain().torch.partition("+")[0] + "+other"
    site = folder / "site"
    info = site / f"torch-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "RECORD").write_text(record)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    # No package: whoever imports torch gets the real one, further down the path.
    (site / "torch").mkdir()
    (site / "torch" / "version.py").write_text(f"__version__ = '{version}'\ncuda: Optional[str] = None\n")
    script = folder / "other-python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{site}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script, installed_toolchain((str(site), *sys.path))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Toolchain]:
    return other_python(tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, other: tuple[Path, Toolchain]) -> Iterator[FakeDaemon]:
    script, _ = other
    folder = tmp_path_factory.mktemp("daemon")
    with FakeDaemon(folder, toolchain={"second": {"python": str(script)}}) as running:
        yield running


def compile_as(
    daemon: FakeDaemon, wanted: Piece, toolchain: Toolchain, *, any_wheel: bool = False
) -> CompileEvent:
    start = CompileStart()
    start.CopyFrom(wanted.start)
    start.toolchain.CopyFrom(toolchain.to_message())
    start.allow_cpu_wheel_builds = any_wheel
    call = Call(daemon.stub(), start)
    try:
        while True:
            event = call.next_of("need_graph", "done", "failed")
            if event.WhichOneof("event") != "need_graph":
                return event
            call.send_graph(wanted.graph)
    finally:
        call.close()


def found_as(
    daemon: FakeDaemon, wanted: Piece, toolchain: Toolchain, *, any_wheel: bool = False
) -> Manifest | None:
    request = LookupRequest(
        toolchain=toolchain.to_message(), items=[wanted.item], allow_cpu_wheel_builds=any_wheel
    )
    (result,) = daemon.stub().Lookup(request, timeout=CALL_S).results
    return Manifest.FromString(result.manifest.manifest) if result.found else None


def fork_servers(daemon: FakeDaemon) -> int:
    tree = psutil.Process(daemon.process.pid).children(recursive=True)
    return sum("fuse_cache.server.worker.forkserver" in " ".join(process.cmdline()) for process in tree)


def test_each_host_is_served_by_its_toolchain_whose_workers_load_when_they_are_needed(
    daemon: FakeDaemon, other: tuple[Path, Toolchain]
) -> None:
    _, second = other
    offers = daemon.stub().Capabilities(CapabilitiesRequest(), timeout=CALL_S).toolchains
    assert [offer.name for offer in offers] == ["own", "second"]
    assert [Toolchain.from_message(offer.toolchain) for offer in offers] == [local_toolchain(), second]
    assert offers[0].epoch != offers[1].epoch
    until(lambda: '"state": "ready"' in daemon.log())
    assert fork_servers(daemon) == 1
    assert not daemon.stub().Capabilities(CapabilitiesRequest(), timeout=CALL_S).toolchains[1].ready

    wanted = piece()
    made = {}
    for toolchain, offer in zip((local_toolchain(), second), offers, strict=True):
        assert found_as(daemon, wanted, toolchain) is None
        made[offer.name] = Manifest.FromString(compile_as(daemon, wanted, toolchain).done.manifest.manifest)
        assert Toolchain.from_message(made[offer.name].toolchain) == toolchain
        assert made[offer.name].epoch == offer.epoch
        assert found_as(daemon, wanted, toolchain) == made[offer.name]
    assert fork_servers(daemon) == 2
    assert made["own"].key != made["second"].key
    differ = {
        ours.name
        for ours, theirs in zip(made["own"].key_fields, made["second"].key_fields, strict=True)
        if ours != theirs
    }
    assert differ == {"torch_fingerprint"}


def test_a_host_that_none_serves_is_told_of_all(daemon: FakeDaemon) -> None:
    stranger = dataclasses.replace(local_toolchain(), torch="2.12.0", torch_fingerprint=b"s" * 32)
    with pytest.raises(grpc.RpcError) as caught:
        compile_as(daemon, piece(number=2), stranger)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert reason_of(caught.value) == "TOOLCHAIN_MISMATCH"
    details = caught.value.details() or ""
    assert f"own: built with torch {local_toolchain().torch}, this host has 2.12.0" in details
    assert f"second: built with torch {VERSION}" in details
    assert found_as(daemon, piece(number=2), stranger) is None


def test_a_host_with_another_wheel_of_the_release_is_served_when_it_says_so(daemon: FakeDaemon) -> None:
    release = local_toolchain().torch.partition("+")[0]
    other_wheel = dataclasses.replace(
        local_toolchain(), torch=f"{release}+cu999", torch_fingerprint=b"w" * 32, cuda="99.9"
    )
    wanted = piece(number=5)
    with pytest.raises(grpc.RpcError) as caught:
        compile_as(daemon, wanted, other_wheel)
    assert reason_of(caught.value) == "TOOLCHAIN_MISMATCH"
    done = compile_as(daemon, wanted, other_wheel, any_wheel=True).done
    manifest = Manifest.FromString(done.manifest.manifest)
    assert Toolchain.from_message(manifest.toolchain) == local_toolchain()
    assert found_as(daemon, wanted, other_wheel) is None
    assert found_as(daemon, wanted, other_wheel, any_wheel=True) == manifest


def test_a_supervisor_that_dies_takes_no_other_toolchain_with_it(
    daemon: FakeDaemon, other: tuple[Path, Toolchain]
) -> None:
    _, second = other
    for toolchain in (local_toolchain(), second):
        assert compile_as(daemon, piece(number=3), toolchain).WhichOneof("event") == "done"
    supervisors = {process.pid: process for process in psutil.Process(daemon.process.pid).children()}
    assert len(supervisors) == 2
    victim = supervisors[min(supervisors)]
    victim.kill()
    until(lambda: not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE)
    for toolchain in (local_toolchain(), second):
        assert compile_as(daemon, piece(number=4), toolchain).WhichOneof("event") == "done"
    living = {process.pid for process in psutil.Process(daemon.process.pid).children()}
    assert len(living & set(supervisors)) == 1, "the other one was not touched"


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("/no/such/python", "python: /no/such/python does not run"),
        ("/bin/false", "/bin/false is no Python 3.11 or newer"),
    ],
)
def test_a_python_that_cannot_be_used_is_named_at_start(tmp_path: Path, python: str, message: str) -> None:
    daemon = FakeDaemon(tmp_path, toolchain={"broken": {"python": python}}).start(wait=False)
    assert daemon.process.wait(60) == 2
    assert "[toolchain.broken]" in daemon.log()
    assert message in daemon.log()


def test_a_python_without_fuse_cache_is_told_what_to_install(tmp_path: Path) -> None:
    script = tmp_path / "bare-python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH= exec "{sys.executable}" -S "$@"\n')
    script.chmod(0o755)
    daemon = FakeDaemon(tmp_path / "d", toolchain={"bare": {"python": str(script)}}).start(wait=False)
    assert daemon.process.wait(60) == 2
    assert f"{script} -m pip install fuse-cache beside its torch" in daemon.log()


def test_another_release_of_fuse_cache_is_refused_at_start(tmp_path: Path) -> None:
    copy_sources(tmp_path / "older" / "fuse_cache")
    protocol = tmp_path / "older" / "fuse_cache" / "server" / "worker" / "protocol.py"
    protocol.write_text(protocol.read_text() + "\n# as it was\n")
    script = tmp_path / "older-python"
    older = tmp_path / "older"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{older}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    daemon = FakeDaemon(tmp_path / "d", toolchain={"older": {"python": str(script)}}).start(wait=False)
    assert daemon.process.wait(60) == 2
    assert f"another release of fuse-cache ({older}/fuse_cache) than this daemon" in daemon.log()


def test_the_own_toolchain_gives_way_to_the_same_by_name_and_twins_are_refused(
    tmp_path: Path, other: tuple[Path, Toolchain]
) -> None:
    script, _ = other
    named = {"mine": {"python": sys.executable}, "second": {"python": str(script)}}
    with FakeDaemon(tmp_path / "one", toolchain=named) as daemon:
        offers = daemon.stub().Capabilities(CapabilitiesRequest(), timeout=CALL_S).toolchains
        assert [offer.name for offer in offers] == ["mine", "second"]
    copy = tmp_path / "third-python"
    shutil.copy(script, copy)
    named["third"] = {"python": str(copy)}
    twins = FakeDaemon(tmp_path / "two", toolchain=named).start(wait=False)
    assert twins.process.wait(60) == 2
    assert "[toolchain.third] has what [toolchain.second] has" in twins.log()
