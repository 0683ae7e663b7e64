"""A daemon without a GPU builds for one: the whole way from a request to a verified artifact."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuse_cache.client.client import Client
from fuse_cache.client.loader import ArtifactLoadError, load
from fuse_cache.client.verify import Artifact, Want
from fuse_cache.proto.container import unpack
from fuse_cache.proto.gpu_kernel import decode_kernel
from fuse_cache.proto.revision import tuned_choices
from tests.daemon import running_daemon
from tests.e2e.conftest import MakeClient
from tests.gpu.build_contents import CONTENTS, request_of


@pytest.mark.timeout(600)
def test_a_gpu_artifact_is_built_proven_and_served(
    tmp_path: Path, trust_dir: Path, make_client: MakeClient
) -> None:
    data, fields, resolved = request_of(CONTENTS["norm-static-fp8"]()[0], "sm_90")
    want = Want.of(fields, data, resolved)
    env = {"FUSE_CACHE_TRUST_DIR": str(trust_dir)}
    with running_daemon(tmp_path / "daemon", "--target", "sm_90", "--target", "cpu-avx2", env=env) as daemon:
        (first,) = make_client(daemon, "one", allow_cpu_wheel_builds=True).obtain([want])
        assert first.error is None, first.error
        assert first.artifact is not None
        assert first.source == "compiled"
        manifest = first.artifact.manifest
        assert manifest.target == "sm_90"
        assert manifest.cpu_wheel_build
        assert {record.name: record.matches for record in manifest.passes if record.matches}[
            "norm_quant"
        ] == 1
        sections = unpack(first.artifact.content)
        assert [name for name in sections if name.startswith("cubin/")]

        (second,) = make_client(daemon, "two", allow_cpu_wheel_builds=True).obtain([want])
        assert second.source == "daemon"
        assert second.artifact is not None
        assert second.artifact.content == first.artifact.content

        # A torch without CUDA is another build of torch than the host's: taken only when the host says so.
        (third,) = make_client(daemon, "three").obtain([want])
        assert third.artifact is None
        assert any("allow_cpu_wheel_builds" in str(error) for error in (*third.rejected, third.error))
    with pytest.raises(ArtifactLoadError, match="sm_90 needs a GPU, and torch sees none here"):
        load(first.artifact.content)


@pytest.mark.timeout(600)
def test_what_one_host_measured_serves_those_that_accept_revisions(
    tmp_path: Path, trust_dir: Path, make_client: MakeClient
) -> None:
    data, fields, resolved = request_of(CONTENTS["part-rope"]()[0], "sm_90")
    want = Want.of(fields, data, resolved)
    env = {"FUSE_CACHE_TRUST_DIR": str(trust_dir)}
    with running_daemon(tmp_path / "daemon", "--target", "sm_90", env=env) as daemon:

        def obtain(host: str, **options: object) -> tuple[Client, Artifact]:
            client = make_client(daemon, host, allow_cpu_wheel_builds=True, **options)
            (found,) = client.obtain([want])
            assert found.artifact is not None, found.error
            return client, found.artifact

        client, first = obtain("one", accept_revisions=True)
        sections = unpack(first.content)
        kernels = {name: decode_kernel(part) for name, part in sections.items() if name.startswith("gpu/")}
        several = {name: kernel for name, kernel in kernels.items() if len(kernel.variants) > 1}
        assert several
        # As the loader would tell after a first call: here there is no device to measure on.
        choices = {name.removeprefix("gpu/"): kernel.variants[-1].cubin for name, kernel in several.items()}
        client.tuned(first, choices)
        assert client.reporter.flush(30)

        _, second = obtain("two", accept_revisions=True)
        assert second.manifest.revision == 1
        assert tuned_choices(unpack(second.content)) == choices
        assert len(second.content) < len(first.content)
        _, third = obtain("three")
        assert third.content == first.content
        _, fourth = obtain("four", accept_revisions=True, tp=2, level="O1")
        assert fourth.manifest.revision == 0  # Ranks of one group use one revision.
