"""Every model builds for three generations of GPUs on a machine without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fuse_cache.client.verify import Want
from fuse_cache.kernels.targets.cubin import architecture_of
from fuse_cache.proto.container import unpack
from fuse_cache.proto.gpu_kernel import decode_kernel
from tests.daemon import running_daemon
from tests.e2e.conftest import MakeClient
from tests.gpu.build_contents import request_of
from tests.models import MODELS, Kind, build_model, capture, example_inputs
from tests.passes.test_compiled_keys import CELLS, ROWS, given, program

pytestmark = pytest.mark.slow
TARGETS = ("sm_80", "sm_90", "sm_100")
KINDS: tuple[Kind, ...] = ("static", "dynamic", "static_cache")


@pytest.mark.timeout(1800)
def test_every_model_builds_for_every_generation(
    tmp_path: Path, trust_dir: Path, make_client: MakeClient
) -> None:
    """In one kind each, all kinds met: what differs between the kinds is tested on CPUs and on a GPU."""
    wants, names = [], []
    for number, name in enumerate(MODELS):
        kind = KINDS[number % len(KINDS)]
        model = build_model(name, torch.bfloat16, layers=1)
        captured = capture(model, **example_inputs(model, kind))
        for target in TARGETS:
            data, fields, resolved = request_of(captured, target)
            wants.append(Want.of(fields, data, resolved))
            names.append((name, kind, target))
    arguments = [part for target in TARGETS for part in ("--target", target)]
    env = {"FUSE_CACHE_TRUST_DIR": str(trust_dir), "FUSE_CACHE_OP_MODULES": "transformers.integrations.moe"}
    with running_daemon(tmp_path / "daemon", *arguments, "--workers", "2", env=env) as daemon:
        client = make_client(daemon, allow_cpu_wheel_builds=True)
        for (name, kind, target), found in zip(names, client.obtain(wants), strict=True):
            assert found.artifact is not None, (name, kind, target, found.error)
            sections = unpack(found.artifact.content)
            kernels = [decode_kernel(data) for key, data in sections.items() if key.startswith("gpu/")]
            cubins = [data for key, data in sections.items() if key.startswith("cubin/")]
            assert kernels, (name, target)
            assert {architecture_of(data) for data in cubins} == {target}
            assert len(sections["wrapper"]) > 0


@pytest.mark.timeout(1800)
def test_every_fusion_is_in_the_artifact_as_machine_code(
    tmp_path: Path, trust_dir: Path, make_client: MakeClient
) -> None:
    """One program of every quantisation key behind a norm, a sum with its norm, or a gated activation."""
    captured = capture(program, *given(ROWS))
    gated = sum(name == "after_activation" for name, _ in CELLS)
    wants = []
    for target in TARGETS:
        data, fields, resolved = request_of(captured, target)
        wants.append(Want.of(fields, data, resolved))
    arguments = [part for target in TARGETS for part in ("--target", target)]
    env = {"FUSE_CACHE_TRUST_DIR": str(trust_dir)}
    with running_daemon(tmp_path / "daemon", *arguments, "--workers", "2", env=env) as daemon:
        client = make_client(daemon, allow_cpu_wheel_builds=True)
        for target, found in zip(TARGETS, client.obtain(wants), strict=True):
            assert found.artifact is not None, (target, found.error)
            manifest = found.artifact.manifest
            matches = {record.name: record.matches for record in manifest.passes if record.is_fusion}
            assert {name: count for name, count in matches.items() if count} == {
                "norm_quant": len(CELLS) - gated, "act_quant": gated
            }, target  # fmt: skip
            assert not manifest.near_misses
            sections = unpack(found.artifact.content)
            entries = [decode_kernel(data).entry for key, data in sections.items() if key.startswith("gpu/")]
            assert entries.count("rms_norm_kernel") == len(CELLS) - gated, target
            assert entries.count("act_and_mul_kernel") == gated, target
            cubins = [data for key, data in sections.items() if key.startswith("cubin/")]
            assert {architecture_of(data) for data in cubins} == {target}
