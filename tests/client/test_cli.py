"""The command line as people and scripts meet it: exit codes, messages, files."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fuse_cache.client.cli import main
from fuse_cache.proto import compile_pb2 as wire
from fuse_cache.proto.signing import SigningKey
from fuse_cache.proto.toolchain import local_toolchain
from tests.fakes import FakeDaemon

COMMANDS = ("serve", "stats", "ls", "show", "rm", "doctor", "keygen", "explain", "warm")


def _run(*arguments: str) -> tuple[int, str, str]:
    """Run a command in this process; the entry point is checked by tests that start one."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()


def test_help_names_every_command_and_each_has_help_of_its_own() -> None:
    code, out, _ = _run("--help")
    assert code == 0
    assert all(command in out for command in COMMANDS)
    code, out, _ = _run("serve", "--help")
    assert code == 0
    options = ["config", "listen", "http", "store", "redis", "workers", "target", "executor", "insecure"]
    assert [option for option in options if f"--{option}" not in out] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("frobnicate",),
        ("ls", "--frobnicate"),
        ("show",),
        ("show", "not-hex"),
        ("show", "abc"),
        ("rm",),
        ("ls", "--endpoint", "nowhere"),
        ("explain", "frobnicate"),
        ("explain", "fusions"),
        ("explain", "fusions", "no-such-file.fcgraph"),
        ("explain", "fusions", __file__),
        ("warm",),
        ("warm", "no-such-file.toml"),
        ("warm", __file__),
        ("serve", "--http", "nowhere"),
        ("serve", "--listen", "0.0.0.0:7788"),
        ("serve", "--target", "cpu-386"),
    ],
)
def test_wrong_usage_exits_with_two_and_says_what_is_wrong(arguments: tuple[str, ...]) -> None:
    code, _, err = _run(*arguments)
    assert code == 2
    assert err.strip()
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("stats",),
        ("ls", "--json"),
        ("show", "0123456789"),
        ("rm", "0123456789"),
        ("explain", "miss"),
        ("explain", "fusions", "0123456789"),
    ],
)
def test_a_daemon_that_is_not_there_exits_with_one_and_says_what_to_do(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    code, out, err = _run(*arguments, "--endpoint", f"unix:{tmp_path}/nobody.sock")
    assert code == 1
    assert out == ""
    assert "fuse-cache serve" in err
    assert "--endpoint" in err


def test_keygen_makes_a_pair_that_works_and_never_overwrites_one(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    code, out, _ = _run("keygen", str(folder))
    assert code == 0
    key = SigningKey.load(folder / "signing.key")
    assert key.builder in out
    assert (folder / "signing.key").stat().st_mode & 0o077 == 0
    before = (folder / "signing.key").read_bytes()
    code, _, err = _run("keygen", str(folder))
    assert code == 1
    assert "exists" in err
    assert (folder / "signing.key").read_bytes() == before


def test_doctor_finds_nothing_wrong_with_a_daemon_it_can_use(daemon: FakeDaemon, endpoint: str) -> None:
    code, out, _ = _run("doctor", "--endpoint", endpoint, "--json")
    findings = {finding["check"]: finding for finding in json.loads(out)}
    assert {name: row["verdict"] for name, row in findings.items() if row["verdict"] == "problem"} == {}
    assert code == 0
    assert {
        "toolchain",
        "cache folder",
        "trust",
        "daemon",
        "toolchain own",
        "for this host",
        "signatures",
    } <= set(findings)
    assert "cpu-" in findings["toolchain own"]["detail"]
    assert "for such processors" in findings["toolchain own"]["detail"]


def test_doctor_says_how_and_with_what_the_daemon_builds_for_gpus(daemon: FakeDaemon, endpoint: str) -> None:
    mine = local_toolchain()
    with_gpu = dataclasses.replace(mine, torch="2.11.0+cu130", torch_fingerprint=b"g" * 32, cuda="13.0")
    daemon.targets = ["sm_90", "sm_80"]
    ways = [wire.WAY_ON_DEVICE, wire.WAY_WITHOUT_DEVICE]
    for name, toolchain, found in (("own", mine, [wire.WAY_WITHOUT_DEVICE] * 2), ("cuda", with_gpu, ways)):
        offers = [wire.TargetOffer(name=t, way=w) for t, w in zip(daemon.targets, found, strict=True)]
        daemon.toolchains.append(
            wire.ToolchainOffer(
                name=name, toolchain=toolchain.to_message(), targets=offers, ready=name == "own"
            )
        )
    _, out, _ = _run("doctor", "--endpoint", endpoint, "--json")
    findings = {finding["check"]: finding for finding in json.loads(out)}
    assert findings["toolchain own"]["detail"].startswith(f"{mine} builds sm_90, sm_80 without a GPU")
    assert ("no CUDA" in findings["toolchain own"]["detail"]) == (not mine.cuda)
    assert findings["toolchain cuda"]["verdict"] == "ok"
    assert findings["toolchain cuda"]["detail"] == (
        f"{with_gpu} (its workers are not loaded yet) builds "
        "sm_90 natively, on the GPU that is there; sm_80 without a GPU"
    )
    assert findings["for this host"]["detail"] == "artifacts for sm_90, sm_80"


def test_doctor_tells_a_host_that_no_toolchain_serves_what_each_lacks(
    daemon: FakeDaemon, endpoint: str
) -> None:
    older = dataclasses.replace(local_toolchain(), torch="2.10.0", torch_fingerprint=b"o" * 32)
    daemon.toolchains = [wire.ToolchainOffer(name="old", toolchain=older.to_message())]
    code, out, _ = _run("doctor", "--endpoint", endpoint, "--json")
    problems = {row["check"]: row for row in json.loads(out) if row["verdict"] == "problem"}
    assert code == 1
    assert set(problems) == {"for this host"}
    assert "old: built with torch 2.10.0, this host has" in problems["for this host"]["detail"]
    assert "[toolchain.NAME]" in problems["for this host"]["advice"]


def test_doctor_names_the_problem_and_the_remedy(daemon: FakeDaemon, endpoint: str) -> None:
    daemon.key = SigningKey.generate()
    code, out, _ = _run("doctor", "--endpoint", endpoint, "--json")
    problems = [finding for finding in json.loads(out) if finding["verdict"] == "problem"]
    assert code == 1
    assert [finding["check"] for finding in problems] == ["signatures"]
    assert "trusted_keys" in problems[0]["advice"]


def test_the_command_line_and_the_public_package_load_without_torch() -> None:
    probe = (
        "import sys, fuse_cache.client, fuse_cache.client.cli.store, fuse_cache.client.cli.doctor, "
        "fuse_cache.client.cli.serve, fuse_cache.client.cli.explain, fuse_cache.client.explain.page, "
        "fuse_cache.client.cli.warm, "
        "fuse_cache.client.client; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", probe], check=False, timeout=60).returncode == 0


def test_serve_does_not_load_what_only_hosts_need() -> None:
    probe = (
        "import sys\nfrom fuse_cache.client.cli import main\n"
        "try: main(['serve', '--help'])\nexcept SystemExit: pass\n"
        "sys.exit(bool({'torch', 'grpc'} & set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", probe], check=False, timeout=60, stdout=subprocess.DEVNULL
        ).returncode
        == 0
    )


def _miss(digest: bytes) -> wire.Miss:
    difference = wire.FieldDifference(name="target", wanted="[red]cpu-avx2[/]", stored="cpu-avx512")
    return wire.Miss(request_digest=digest, nearest=[wire.Neighbour(key=bytes(32), differences=[difference])])


def test_explain_miss_names_the_fields_that_differ(daemon: FakeDaemon, endpoint: str) -> None:
    daemon.explained = wire.ExplainResponse(misses=[_miss(b"\xaa" * 32), _miss(b"\xbb" * 32)])
    code, out, _ = _run("explain", "miss", "--endpoint", endpoint)
    assert code == 0
    assert "target: wanted [red]cpu-avx2[/], stored cpu-avx512" in out
    code, out, _ = _run("explain", "miss", "bbbb", "--endpoint", endpoint, "--json")
    (found,) = json.loads(out)
    assert found["request_digest"] == "bb" * 32
    assert found["nearest"][0]["differences"][0]["name"] == "target"
    _, out, _ = _run("explain", "miss", "cccc", "--endpoint", endpoint)
    assert "no such miss" in out
