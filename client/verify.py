"""What a client checks before it opens content: who signed it, whether it answers its own request, whether it
is whole.

A validly signed artifact under another's key must be refused: whoever can write to a store can swap entries.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from dataclasses import dataclass

from fuse_cache.client.errors import ArtifactRejectedError
from fuse_cache.client.options import CompileOptions
from fuse_cache.proto.artifact_pb2 import CompileRange, Manifest, SignedManifest
from fuse_cache.proto.artifact_pb2 import Toolchain as ToolchainMessage
from fuse_cache.proto.content import verify_content
from fuse_cache.proto.errors import ContentError, TrustError
from fuse_cache.proto.pass_config import ResolvedPassConfig
from fuse_cache.proto.request import Range, RequestFields
from fuse_cache.proto.signing import SignatureError, TrustSet, verify
from fuse_cache.proto.toolchain import Toolchain
from fuse_cache.proto.trust import open_trust_folder


@dataclass(frozen=True, slots=True)
class Artifact:
    """A verified artifact: its manifest answers the request, and the content fits the manifest."""

    signed: SignedManifest
    manifest: Manifest
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """One artifact that a host asks for: the request, the graph behind it, and what both come to."""

    fields: RequestFields
    graph: bytes
    resolved: ResolvedPassConfig
    request_digest: bytes
    family_digest: bytes
    pass_config_hash: bytes
    passes: tuple[str, ...]  # active for the range, in pipeline order
    allow_covering: bool = False

    @staticmethod
    def of(
        fields: RequestFields, graph: bytes, resolved: ResolvedPassConfig, *, allow_covering: bool = False
    ) -> Want:
        """Compute the digests and the active passes of a request."""
        return Want(
            fields=fields,
            graph=graph,
            resolved=resolved,
            request_digest=fields.request_digest(),
            family_digest=fields.family_digest(),
            pass_config_hash=resolved.hash(),
            passes=resolved.active_passes(fields.range),
            allow_covering=allow_covering and fields.range.symbol is not None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Checker:
    """Everything an artifact is held against, apart from the request. `revoked` are builder ids."""

    options: CompileOptions
    toolchain: Toolchain
    keys: frozenset[bytes]
    revoked: frozenset[str] = frozenset()

    def manifest(self, signed: SignedManifest, want: Want) -> Manifest:
        """Return the manifest after signature, signer and every field of the request were found right.

        Raises:
            ArtifactRejectedError: verdict BAD_SIGNATURE or WRONG_MANIFEST.
        """
        trusted = TrustSet(keys=self.keys, revoked=self.revoked, allow_unsigned=self.options.allow_unsigned)
        try:
            manifest = verify(signed, trusted)
        except SignatureError as error:
            raise ArtifactRejectedError("BAD_SIGNATURE", str(error)) from error
        problem = self._mismatch(manifest, want)
        if problem:
            raise ArtifactRejectedError("WRONG_MANIFEST", problem)
        return manifest

    def content(self, signed: SignedManifest, manifest: Manifest, content: bytes) -> Artifact:
        """Return the artifact after its content was found whole.

        Raises:
            ArtifactRejectedError: verdict BAD_DIGEST.
        """
        try:
            verify_content(manifest.content, content)
        except ContentError as error:
            raise ArtifactRejectedError("BAD_DIGEST", str(error)) from error
        return Artifact(signed, manifest, content)

    def _mismatch(self, manifest: Manifest, want: Want) -> str | None:
        """Return how the manifest differs from what was asked for, or None."""
        fields, options = want.fields, self.options
        stored = manifest.namespace, manifest.graph_digest, manifest.pass_config_hash, manifest.target
        asked = options.namespace, fields.graph_digest, want.pass_config_hash, fields.target
        if stored != asked:
            names = "namespace", "graph_digest", "pass_config_hash", "target"
            name, *pair = next(row for row in zip(names, stored, asked, strict=True) if row[1] != row[2])
            shown = [item.hex()[:16] if isinstance(item, bytes) else item for item in pair]
            return f"the manifest is for {name} {shown[0]}, {shown[1]} was asked for"
        if manifest.request_digest != want.request_digest:
            if not want.allow_covering or manifest.family_digest != want.family_digest:
                return "the manifest answers another request"
            if not _covers(manifest, want):
                return "the manifest's range does not cover the one asked for, with the same passes"
        elif _range_of(manifest) != fields.range:
            return "the manifest's range is not the one asked for"
        if manifest.revision and not options.accept_revisions:
            return f"a tuned build (revision {manifest.revision}); accept_revisions takes it"
        if manifest.cpu_wheel_build and not options.allow_cpu_wheel_builds:
            return "built with a CPU wheel; allow_cpu_wheel_builds takes it"
        return _incompatible(
            self.toolchain,
            manifest.toolchain.SerializeToString(deterministic=True),
            fields.target,
            options.allow_cpu_wheel_builds,
        )


@functools.lru_cache(maxsize=64)
def _incompatible(host: Toolchain, builder: bytes, target: str, any_wheel: bool) -> str | None:
    """Return why `host` cannot use what that toolchain builds; many artifacts have one builder."""
    theirs = Toolchain.from_message(ToolchainMessage.FromString(builder))
    return host.compatible_with(theirs, target=target, any_wheel=any_wheel)


def trusted_keys(options: CompileOptions) -> frozenset[bytes]:
    """Return the public keys that a client trusts: those of its options, and of this uid's trust folder if it
    has one."""
    keys = set(options.trusted_keys)
    # None there, or somebody else could have written to it: no source of trust, and `doctor` says why.
    with suppress(TrustError):
        keys.update(open_trust_folder(create=False).trusted_keys())
    return frozenset(keys)


def range_message(compile_range: Range) -> CompileRange:
    """Return a range as messages carry it."""
    if compile_range.symbol is None:
        return CompileRange()
    return CompileRange(
        lower=compile_range.lower, upper=compile_range.upper, symbol_plus_one=compile_range.symbol + 1
    )


def _range_of(manifest: Manifest) -> Range:
    """Return the manifest's range in the request's form."""
    bounds = manifest.range
    if not bounds.symbol_plus_one:
        return Range()
    return Range(symbol=bounds.symbol_plus_one - 1, lower=bounds.lower, upper=bounds.upper)


def _covers(manifest: Manifest, want: Want) -> bool:
    """Tell whether a larger range holds the one asked for and the same passes ran in both."""
    stored, asked = _range_of(manifest), want.fields.range
    return (
        stored.symbol == asked.symbol
        and stored.lower <= asked.lower
        and asked.upper <= stored.upper
        # A range of one size is built with the size burnt in; a wider one never stands in for it, nor it for
        # one.
        and (asked.lower < asked.upper)
        and want.resolved.active_passes(stored) == want.passes
    )
