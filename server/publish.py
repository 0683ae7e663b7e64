"""Sealing: what a worker built becomes a manifest that says all about it, signed, over content by digest."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fuse_cache.proto.artifact_pb2 import (
    CompileRange,
    KeyField,
    Manifest,
    NearMiss,
    PassRecord,
    SignedManifest,
)
from fuse_cache.proto.content import describe_content
from fuse_cache.proto.cpu_target import is_cpu_target
from fuse_cache.proto.pass_config import ResolvedPassConfig
from fuse_cache.proto.request import Range, RequestFields
from fuse_cache.proto.signing import MANIFEST_SCHEMA, PURPOSE_ARTIFACT, SigningKey
from fuse_cache.server.epoch import Epoch
from fuse_cache.server.key import KeyFields
from fuse_cache.server.worker.protocol import Built

MAX_NEAR_MISSES = (
    1000  # In one manifest: 200 kB of its limit of 1 MiB. The count in the log says how many there were.
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """A manifest and what was signed of it."""

    manifest: Manifest
    signed: SignedManifest


def to_message(bounds: Range) -> CompileRange:
    """Return a compile range as a message."""
    symbol_plus_one = 0 if bounds.symbol is None else bounds.symbol + 1
    return CompileRange(lower=bounds.lower, upper=bounds.upper, symbol_plus_one=symbol_plus_one)


def seal(
    built: Built,
    *,
    key: KeyFields,
    request: RequestFields,
    epoch: Epoch,
    signing_key: SigningKey,
    model: str = "",
    now_s: Callable[[], float] = time.time,
) -> Sealed:
    """Describe and sign what was built. Blocking: 2 ms per 8 MiB of content.

    Raises:
        ContentError: the content is empty or too large.
    """
    pass_config = ResolvedPassConfig.decode(request.pass_config)
    manifest = Manifest(
        schema=MANIFEST_SCHEMA,
        key=key.digest(),
        request_digest=key.request_digest,
        namespace=key.namespace,
        graph_digest=request.graph_digest,
        pass_config_hash=pass_config.hash(),
        range=to_message(request.range),
        target=request.target,
        epoch=epoch.name,
        toolchain=epoch.toolchain.to_message(),
        builder=signing_key.builder,
        created_unix_s=int(now_s()),
        content=describe_content(built.content),
        compile_seconds=built.compile_seconds,
        key_fields=[KeyField(name=name, value=value) for name, value in key.describe() + request.describe()],
        passes=_records(built, pass_config, request.range, epoch.passes),
        near_misses=[
            NearMiss(
                reason=item["reason"],
                node=item.get("node", ""),
                detail=item.get("detail", ""),
                **{"pass": item["pass_name"]},  # A keyword of Python.
            )
            for item in built.near_misses[:MAX_NEAR_MISSES]
        ],
        nodes=min(built.nodes, (1 << 32) - 1),
        cudagraph_mode=built.cudagraph_mode,
        # A CPU wheel and a CUDA wheel of one release are two builds: hosts take this when told to.
        cpu_wheel_build=not is_cpu_target(request.target) and not epoch.toolchain.cuda,
        purpose=PURPOSE_ARTIFACT,
        model=model,
        family_digest=request.family_digest(),
    )
    return Sealed(manifest=manifest, signed=signing_key.sign(manifest.SerializeToString()))


def _records(
    built: Built, config: ResolvedPassConfig, bounds: Range, fingerprints: Mapping[str, bytes]
) -> list[PassRecord]:
    """Return one record per pass: what ran as the worker tells it, the rest with why it is off."""
    ran = {record["name"]: record for record in built.passes}
    reasons = {name: (on, why) for name, on, why in config.reasons(bounds)}
    records = []
    for name in [*reasons, *(name for name in ran if name not in reasons)]:
        on, why = reasons.get(name, (True, ""))
        told = ran.get(name, {})
        records.append(
            PassRecord(
                name=name,
                on=told.get("on", on),
                reason=told.get("reason", "") or why,
                candidates=told.get("candidates", 0),
                matches=told.get("matches", 0),
                milliseconds=told.get("milliseconds", 0.0),
                bytes_saved=told.get("bytes_saved", 0),
                is_fusion=told.get("is_fusion", False),
                fingerprint=fingerprints.get(name, b"") if told.get("on", on) else b"",
            )
        )
    return records
