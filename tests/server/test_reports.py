"""What a host could not use saved nothing; and nobody can take back more than was counted."""

from __future__ import annotations

from typing import Any

import pytest

from fuse_cache.proto.artifact_pb2 import Manifest, SignedManifest
from fuse_cache.proto.compile_pb2 import KernelChoice, ReportItem, ReportRequest, Verdict
from fuse_cache.proto.container import pack, unpack
from fuse_cache.proto.content import describe_content
from fuse_cache.proto.gpu_kernel import GpuKernel, Variant, encode_kernel
from fuse_cache.proto.revision import revised_key, tuned_choices
from fuse_cache.proto.signing import MANIFEST_SCHEMA, PURPOSE_ARTIFACT, SigningKey, TrustSet, verify
from fuse_cache.server.cache.facts import describe
from fuse_cache.server.cache.memory import MemoryTier
from fuse_cache.server.cache.store import compose
from fuse_cache.server.metrics import Metrics
from fuse_cache.server.reports import Reports
from fuse_cache.server.revisions import Revisions
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
    reports = Reports(store, status, metrics, Revisions(store, status, SIGNER))

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


def gpu_content() -> bytes:
    """One kernel of two variants, and one of one."""

    def kernel(*cubins: str) -> bytes:
        variants = tuple(
            Variant(cubin=cubin, shared=0, warps=4, types="O", scratch=0, config=cubin) for cubin in cubins
        )
        return encode_kernel(GpuKernel(entry="k", variants=variants))

    return pack(
        {
            "wrapper": b"", "gpu/two": kernel("a", "b"), "gpu/one": kernel("c"), "cubin/a": b"A" * 100,
            "cubin/b": b"B", "cubin/c": b"C",
        }
    )  # fmt: skip


async def test_a_hosts_choice_of_variants_becomes_a_second_revision() -> None:
    content = gpu_content()
    signed, manifest = signed_manifest(content)
    store = compose(MemoryTier(limit_bytes=1 << 20), SwitchTier())
    await store.publish(signed, manifest.key, content, describe(manifest))
    trusted = TrustSet(keys=frozenset({SIGNER.public_key}))
    status: Any = type("Status", (), {"trusted": trusted})()
    revisions = Revisions(store, status, SIGNER)
    reports = Reports(store, status, Metrics(), revisions)

    async def tell(cubin: str, *, kernel: str = "two", namespace: str = "team", digest: bytes = b"") -> None:
        item = ReportItem(
            key=manifest.key,
            content_digest=digest or manifest.content.digest,
            verdict=Verdict.VERDICT_TUNED,
            choices=[KernelChoice(kernel=kernel, cubin=cubin)],
        )
        await reports.take(ReportRequest(namespace=namespace, items=[item]))

    key = revised_key(manifest.key)
    await tell("a", namespace="others")
    await tell("a", digest=bytes(32))
    await tell("c")  # Not a variant of that kernel.
    await tell("a", kernel="three")
    assert revisions.made == 0
    assert await store.get_manifest(key) is None
    await tell("b")
    await tell("a")  # Too late: one tuned build for all.
    assert revisions.made == 1
    found = await store.get_manifest(key)
    assert found is not None
    revised = verify(SignedManifest.FromString(found.data), trusted)
    assert (revised.key, revised.revision, revised.request_digest) == (key, 1, manifest.request_digest)
    tuned = await store.get_content(revised.content.digest)
    assert tuned is not None
    sections = unpack(tuned.data)
    assert tuned_choices(sections) == {"two": "b"}
    assert {name for name in sections if name.startswith("cubin/")} == {"cubin/b", "cubin/c"}
    first = await store.get_manifest(manifest.key)
    assert first is not None
    assert first.data == signed
    await store.close()
