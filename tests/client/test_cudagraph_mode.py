"""What a report recommends for CUDA graphs is about the artifact's device."""

from __future__ import annotations

import pytest

from fuse_cache.client.reports import GraphReport, describe_manifest
from fuse_cache.proto.artifact_pb2 import Manifest
from fuse_cache.proto.pass_config import PassConfig, PassContext
from fuse_cache.proto.request import Range


@pytest.mark.parametrize("source", ["memory", "disk", "daemon", "compiled"])
def test_an_artifact_for_a_cpu_recommends_no_cuda_graphs_wherever_it_came_from(source: str) -> None:
    resolved = PassConfig().resolve(PassContext(target="sm_90"), "O2")
    assert resolved.cudagraph_mode != "NONE"  # The level's wish, which knows of no device.
    for target, mode in (("cpu-avx2", "NONE"), ("sm_90", resolved.cudagraph_mode)):
        report = GraphReport(key="", source=source)  # type: ignore[arg-type]  # each of them is one
        describe_manifest(report, Manifest(target=target), resolved, Range())
        assert report.cudagraph_mode == mode
