"""What a host could not use saved nothing; and nobody can take back more than was counted."""

from __future__ import annotations

from typing import Any

import pytest

from fuse_cache.proto.artifact_pb2 import Manifest
from fuse_cache.proto.compile_pb2 import ReportItem, ReportRequest, Verdict
from fuse_cache.proto.content import describe_content
from fuse_cache.proto.signing import MANIFEST_SCHEMA, PURPOSE_ARTIFACT, SigningKey, TrustSet
from fuse_cache.server.cache.facts import describe
from fuse_cache.server.cache.memory import MemoryTier
from fuse_cache.server.cache.store import compose
from fuse_cache.server.metrics import Metrics
from fuse_cache.server.reports import Reports
from tests.server.cache.fakes import SwitchTier

SIGNER = SigningKey.generate()


def signed_manifest(content: bytes) -> tuple[bytes, Manifest]:
    manifest = Manifest(
        schema=MANIFEST_SCHEMA, key=bytes(range(32)), request_digest=bytes(32), namespace="team",
        graph_digest=bytes(32), pass_config_hash=bytes(32), target="cpu-avx2", builder=SIGNER.builder,
        content=describe_content(content), compile_seconds=3.0, purpose=PURPOSE_ARTIFACT,
    )  # fmt: skip
    return SIGNER.sign(manifest.SerializeToString()).SerializeToString(), manifest


async def test_hits_that_hosts_report_bad_are_taken_back_once_each() -> None:
    content = b"artifact" * 10
    signed, manifest = signed_manifest(content)
    store = compose(MemoryTier(limit_bytes=1 << 20), SwitchTier())
    await store.publish(signed, manifest.key, content, describe(manifest))
    status: Any = type("Status", (), {"trusted": TrustSet(keys=frozenset({SIGNER.public_key}))})()
    metrics = Metrics()
    reports = Reports(store, status, metrics)

    async def report(verdict: Verdict.ValueType, count: int, namespace: str = "team") -> float:
        item = ReportItem(key=manifest.key, verdict=verdict, count=count)
        await reports.take(ReportRequest(namespace=namespace, items=[item]))
        return metrics.hot.seconds_rejected

    for _ in range(2):
        assert await store.get_manifest(manifest.key) is not None
    assert await report(Verdict.VERDICT_USED, 1) == 0
    assert await report(Verdict.VERDICT_BAD_DIGEST, 1, namespace="others") == 0
    assert await report(Verdict.VERDICT_BAD_DIGEST, 1) == pytest.approx(3.0)
    taken = await report(Verdict.VERDICT_BAD_DIGEST, 1_000_000)
    assert taken == pytest.approx(3.0 * store.catalogue.hits(manifest.key), abs=3.0)
    await store.close()
