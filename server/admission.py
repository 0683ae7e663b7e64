"""What a request must be before anything is done for it, and the fields of its key."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fuse_cache.proto import artifact_pb2, compile_pb2
from fuse_cache.proto.errors import RequestError as MalformedRequestError
from fuse_cache.proto.limits import REQUEST_BYTES
from fuse_cache.proto.pass_config import PassConfigError, ResolvedPassConfig
from fuse_cache.proto.request import RequestFields, decode_request
from fuse_cache.proto.toolchain import Toolchain
from fuse_cache.server.epoch import Epoch
from fuse_cache.server.errors import InvalidRequestError, NotOnOfferError
from fuse_cache.server.key import KeyFields

DIGEST_BYTES = 32
MODEL_CHARS = 256
TARGET_CHARS = 64  # "cpu-avx512", "sm_90"; memos and the log of misses keep what was asked for.
TOOLCHAIN_BYTES = 512  # Four versions and two fingerprints: 110.
_NAMESPACE = re.compile(r"[A-Za-z0-9._/-]{0,128}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A request that this daemon can answer."""

    key: KeyFields
    request: RequestFields
    request_bytes: bytes
    epoch: Epoch
    model: str


def check_namespace(namespace: str) -> None:
    """Raises: InvalidRequestError (not a name that we give)."""
    if namespace and not _NAMESPACE.fullmatch(namespace):
        raise InvalidRequestError(
            "REQUEST_MALFORMED", "namespace: at most 128 letters, digits and . _ / - are allowed"
        )


def check_digest(name: str, digest: bytes) -> None:
    """Raises: InvalidRequestError (not 32 bytes)."""
    if len(digest) != DIGEST_BYTES:
        raise InvalidRequestError("REQUEST_MALFORMED", f"{name} has {len(digest)} bytes instead of 32")


def check_target(target: str) -> None:
    """Raises: InvalidRequestError (longer than any target's name)."""
    if len(target) > TARGET_CHARS:
        raise InvalidRequestError(
            "REQUEST_MALFORMED", f"target: {len(target)} characters, the limit is {TARGET_CHARS}"
        )


class Gate:
    """Lets requests in that name a target, a toolchain and passes of this daemon."""

    def __init__(self, targets: tuple[str, ...]) -> None:
        self.targets = targets
        self._reasons: dict[tuple[bytes, str, str], str | None] = {}

    def host(self, message: artifact_pb2.Toolchain) -> bytes:
        """Return what `mismatch` takes for the toolchain of a host; empty when it does not say.

        Raises:
            InvalidRequestError: longer than a toolchain can be.
        """
        if not message.torch:
            return b""
        host_bytes = message.SerializeToString(deterministic=True)
        if len(host_bytes) > TOOLCHAIN_BYTES:
            raise InvalidRequestError(
                "REQUEST_MALFORMED", f"toolchain: {len(host_bytes)} bytes, the limit is {TOOLCHAIN_BYTES}"
            )
        return host_bytes

    def mismatch(self, host_bytes: bytes, epoch: Epoch, target: str) -> str | None:
        """Return why a host with this toolchain cannot use what we build for `target`, or None.

        A host that does not say what it has is taken at its request: its own check of the manifest decides.
        """
        if not host_bytes:
            return None
        memo_key = (host_bytes, epoch.name, target)
        if memo_key not in self._reasons:
            if len(self._reasons) >= 1024:  # Kinds of hosts, not hosts: a few in practice.
                self._reasons.clear()
            host = Toolchain.from_message(artifact_pb2.Toolchain.FromString(host_bytes))
            self._reasons[memo_key] = host.compatible_with(epoch.toolchain, target=target)
        return self._reasons[memo_key]

    def admit(self, start: compile_pb2.CompileStart, epoch: Epoch) -> Admitted:
        """Check the start of a Compile.

        Raises:
            InvalidRequestError: a field is malformed, or does not fit another.
            NotOnOfferError: nobody here builds for that target or toolchain.
        """
        check_namespace(start.namespace)
        check_digest("request_digest", start.request_digest)
        check_digest("graph_digest", start.graph_digest)
        if len(start.model) > MODEL_CHARS or not start.model.isprintable():
            raise InvalidRequestError(
                "REQUEST_MALFORMED", f"model: at most {MODEL_CHARS} printable characters"
            )
        request, pass_config = _decode(start)
        if request.target not in self.targets:
            offer = ", ".join(self.targets) or "nothing"
            raise NotOnOfferError(
                "TARGET_UNAVAILABLE",
                f"nobody here builds for {request.target}; on offer: {offer}",
                metadata={"targets": ",".join(self.targets)},
            )
        reason = self.mismatch(self.host(start.toolchain), epoch, request.target)
        if reason is not None:
            raise NotOnOfferError(
                "TOOLCHAIN_MISMATCH",
                f"{reason}; on offer: {epoch.toolchain}",
                metadata={
                    "host": str(Toolchain.from_message(start.toolchain)),
                    "offer": str(epoch.toolchain),
                },
            )
        try:
            key = epoch.key_fields(
                request_digest=start.request_digest,
                namespace=start.namespace,
                target=request.target,
                passes=pass_config.active_passes(request.range),
            )
        except KeyError as error:
            raise InvalidRequestError("REQUEST_MALFORMED", f"pass_config: no pass {error} here") from error
        return Admitted(key=key, request=request, request_bytes=start.request, epoch=epoch, model=start.model)


def _decode(start: compile_pb2.CompileStart) -> tuple[RequestFields, ResolvedPassConfig]:
    if len(start.request) > REQUEST_BYTES:
        raise InvalidRequestError(
            "REQUEST_MALFORMED", f"request has {len(start.request)} bytes, the limit is {REQUEST_BYTES}"
        )
    try:
        request = decode_request(start.request)
    except MalformedRequestError as error:
        raise InvalidRequestError("REQUEST_MALFORMED", f"request: {error}") from error
    for name, announced, actual in (
        ("request_digest", start.request_digest, request.request_digest()),
        ("graph_digest", start.graph_digest, request.graph_digest),
    ):
        if announced != actual:
            raise InvalidRequestError(
                "DIGEST_MISMATCH",
                f"{name} is {announced.hex()[:12]}..., the request says {actual.hex()[:12]}...",
            )
    try:
        return request, ResolvedPassConfig.decode(request.pass_config)
    except PassConfigError as error:
        raise InvalidRequestError("REQUEST_MALFORMED", f"pass_config: {error}") from error
