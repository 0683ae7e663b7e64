"""Cases 3, 18, 19 and 53: what makes another key, and what does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn

from fuse_cache.client import report
from fuse_cache.client.errors import OptionError
from fuse_cache.client.options import CompileOptions
from fuse_cache.proto.container import unpack
from fuse_cache.proto.inductor_options import ALLOWED
from fuse_cache.proto.pass_config import PassConfig, PassContext
from fuse_cache.proto.spec import decode_spec
from tests.daemon import Daemon, run_cli, running_daemon
from tests.e2e import key_host
from tests.e2e.conftest import MakeClient
from tests.e2e.small import silu_graph, small

HOSTS = {
    # PYTHONHASHSEED, and what else is its own on every host.
    "zero": {"PYTHONHASHSEED": "0", "KEY_HOST_SHARED": "1", "CUDA_VISIBLE_DEVICES": "0", "RANK": "0"},
    "one": {
        "PYTHONHASHSEED": "1", "KEY_HOST_SHARED": "0", "CUDA_VISIBLE_DEVICES": "1", "RANK": "1",
        "MASTER_PORT": "29501", "HOSTNAME": "pod-7f9c", "MAKEFLAGS": "--jobserver-auth=3,4",
    },
    "two": {"PYTHONHASHSEED": "2", "KEY_HOST_BEFORE": "100", "MASTER_ADDR": "10.0.0.7", "VLLM_PORT": "5557"},
    "random": {"PYTHONHASHSEED": "random", "RAY_ADDRESS": "10.1.2.3:6379", "LOCAL_RANK": "3"},
}  # fmt: skip


def _start(daemon: Daemon, name: str, folder: Path) -> subprocess.Popen[str]:
    home = folder / name
    (home / "temp").mkdir(parents=True)
    env = {
        **os.environ, **daemon.env, **HOSTS[name], "HOME": str(home), "TMPDIR": str(home / "temp"),
        "XDG_CACHE_HOME": str(home / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"),
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, key_host.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=env, cwd=home,
    )  # fmt: skip
    assert process.stdin is not None
    options = {"endpoint": daemon.endpoint, "mode": "remote", "namespace": "keys"}
    process.stdin.write(json.dumps(options))
    process.stdin.close()
    process.stdin = None
    return process


def _finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert found["worst"] <= 1e-6
    return found


def test_hosts_that_differ_in_all_but_the_program_share_one_key_whose_parts_can_be_shown(
    shared_daemon: Daemon, tmp_path: Path
) -> None:
    processes = [_start(shared_daemon, name, tmp_path) for name in HOSTS]
    found = [_finish(process) for process in processes]
    (key,) = {row["key"] for row in found}
    assert {row["source"] for row in found} <= {"compiled", "daemon"}
    entries = [entry for entry in shared_daemon.entries() if entry["namespace"] == "keys"]
    assert [entry["key"] for entry in entries] == [key]

    shown = run_cli("show", key, "--endpoint", shared_daemon.endpoint, "--json", env=shared_daemon.env)
    parts = json.loads(shown)["parts"]
    for name in ("graph", "target", "namespace", "range", "torch_fingerprint", "ambient.grad_mode", "schema"):
        assert name in parts
    for text in (str(tmp_path), "pod-7f9c", "29501", "10.0.0.7", os.uname().nodename):
        assert text not in shown
    table = run_cli("show", key[:12], "--endpoint", shared_daemon.endpoint, env=shared_daemon.env)
    assert "torch_fingerprint" in table


@contextmanager
def _patched(holder: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def test_each_switch_that_can_change_the_code_makes_a_request_of_its_own() -> None:
    graph = silu_graph(2)
    plain = graph.want().fields

    def with_config(**fields: Any) -> bytes:
        resolved = PassConfig(**fields).resolve(PassContext(target=plain.target))
        return replace(plain, pass_config=resolved.encode()).request_digest()

    digests = {
        "plain": plain.request_digest(),
        "an Inductor option": graph.want(inductor={"epilogue_fusion": False}).request_digest,
        "its other value": graph.want(inductor={"epilogue_fusion": True}).request_digest,
        "a pass off": with_config(fuse_norm_quant=False),
        "no-ops kept": with_config(eliminate_noops=False),
        "attention backend": replace(plain, attention_backend="math").request_digest(),
        "target": replace(plain, target="cpu-avx512").request_digest(),
    }
    with torch.autocast("cpu", dtype=torch.bfloat16):
        digests["autocast"] = graph.want().request_digest
    with _patched(torch.backends.cuda.matmul, "allow_tf32", True):
        digests["tf32"] = graph.want().request_digest
    torch.use_deterministic_algorithms(True)
    try:
        digests["deterministic"] = graph.want().request_digest
    finally:
        torch.use_deterministic_algorithms(False)

    def quantised(dtype: torch.dtype) -> bytes:
        return small(lambda x: x.to(dtype).to(torch.float32), torch.randn(4, 4)).want().request_digest

    digests["fp8 fn"] = quantised(torch.float8_e4m3fn)
    digests["fp8 fnuz"] = quantised(torch.float8_e4m3fnuz)
    assert len(set(digests.values())) == len(digests), digests
    # Of functorch a host has no say: what it sets for itself reaches no daemon, so it makes no other key.
    with functorch_config.patch(cse=False, functionalize_rng_ops=True):
        assert graph.want().request_digest == digests["plain"]
    functorch = [name for name in functorch_config.get_config_copy() if name not in ALLOWED]
    assert {"cse", "functionalize_rng_ops", "custom_op_default_layout_constraint"} <= set(functorch)
    functorch += [f"functorch.{name}" for name in functorch]
    for refused in ("cpp_wrapper", "freezing", "max_autotune", "post_grad_custom_post_pass", *functorch):
        with pytest.raises(OptionError, match="not allowed"):
            CompileOptions.from_mapping({"inductor": {refused: True}})


@pytest.mark.slow
def test_the_daemons_own_environment_does_not_reach_what_it_builds(
    shared_daemon: Daemon, make_client: MakeClient, tmp_path: Path, trust_dir: Path
) -> None:
    """Same key, so the same code: switches of Inductor in a daemon's environment would drift unseen."""
    env = {
        "FUSE_CACHE_TRUST_DIR": str(trust_dir), "TORCHINDUCTOR_CPP_WRAPPER": "1",
        "TORCHINDUCTOR_FREEZING": "1",
        "TORCHINDUCTOR_CPP_ENABLE_FLOATING_POINT_CONTRACT_FLAG": "fast",
        "TORCHINDUCTOR_CPP_ENABLE_UNSAFE_MATH_OPT_FLAG": "1", "TORCHINDUCTOR_CPP_SIMDLEN": "1",
        "TORCHINDUCTOR_CPP_MIN_CHUNK_SIZE": "1", "TORCH_COMPILE_DEBUG": "1",
        # What functorch reads.
        "FAKE_ALLOW_META": "0", "AOT_PARTITIONER_DEBUG": "1", "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE": "1",
    }  # fmt: skip
    graph = silu_graph(3)
    (plain,) = make_client(shared_daemon, host="plain", namespace="environment").obtain([graph.want()])
    with running_daemon(tmp_path / "daemon", "--workers", "1", env=env) as switched:
        client = make_client(switched, host="switched", namespace="environment")
        (answer,) = client.obtain([graph.want()])
    assert plain.artifact is not None, plain.error
    assert answer.artifact is not None, answer.error
    assert answer.source == "compiled"
    assert answer.artifact.manifest.key == plain.artifact.manifest.key
    assert answer.artifact.manifest.content.digest == plain.artifact.manifest.content.digest


def _mlp(bias: bool) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(128, 256, bias), nn.ReLU(), nn.Linear(256, 128, bias)).eval().bfloat16()


def _two_pieces(x: Tensor) -> Tensor:
    return torch.cumsum(x + 1, 0) * 2


def _hosted(
    daemon: Daemon, function: Callable[..., Any], x: Tensor, cache: Path, **options: Any
) -> list[Any]:
    torch._dynamo.reset()
    values = {
        "endpoint": daemon.endpoint, "mode": "remote", "namespace": "pieces",
        "cache_dir": str(cache), **options,
    }  # fmt: skip
    compiled: Any = torch.compile(function, backend="fuse_cache", fullgraph=True, options=values)
    before = len(report())
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), function(x), rtol=1.6e-2, atol=1e-2)
    return report(json=True)[before:]


def test_pieces_of_equal_shapes_never_get_each_others_code_across_a_restart(
    tmp_path: Path, trust_dir: Path
) -> None:
    x, rows = torch.randn(4, 128).bfloat16(), torch.randn(6, 128)
    env = {"FUSE_CACHE_TRUST_DIR": str(trust_dir)}

    def both_models(daemon: Daemon, cache: Path) -> list[Any]:
        found = []
        for bias in (False, True):
            found += _hosted(daemon, _mlp(bias), x, cache)
        return found + _hosted(daemon, _two_pieces, rows, cache, splitting_ops=["torch.cumsum"])

    with running_daemon(tmp_path / "daemon", "--workers", "2", env=env) as daemon:
        warmed = both_models(daemon, tmp_path / "warm")
        assert [row["source"] for row in warmed] == ["compiled"] * 4
        assert len({row["key"] for row in warmed}) == 4
        assert daemon.stop() == 0
        daemon.start()
        loaded = both_models(daemon, tmp_path / "fresh")
        assert [(row["source"], row["key"]) for row in loaded] == [("daemon", row["key"]) for row in warmed]
        assert daemon.stats()["compiles"] == 0
        inputs = []
        for row in warmed:
            shown = run_cli("show", row["key"], "--endpoint", daemon.endpoint, "--json", env=daemon.env)
            digest, size = json.loads(shown)["content_digest"], json.loads(shown)["content_bytes"]
            content = (daemon.store / "content" / digest[:2] / digest).read_bytes()[-size:]
            inputs.append(len(decode_spec(unpack(content)["spec"]).inputs))
    assert inputs == [3, 5, 1, 1]  # x and two weights; their biases too; one tensor
