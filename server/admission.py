"""What a request must be before anything is done for it, and the fields of its key."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fuse_cache.proto import compile_pb2
from fuse_cache.proto.errors import RequestError as MalformedRequestError
from fuse_cache.proto.gpu_target import UnknownGpuError, is_gpu_target
from fuse_cache.proto.limits import REQUEST_BYTES
from fuse_cache.proto.pass_config import PassConfigError, ResolvedPassConfig
from fuse_cache.proto.request import RequestFields, decode_request
from fuse_cache.proto.target_facts import gpu_of
from fuse_cache.proto.toolchain import Toolchain
from fuse_cache.server.builders import Builder, Builders, host_of
from fuse_cache.server.epoch import Epoch
from fuse_cache.server.errors import InvalidRequestError, NotOnOfferError
from fuse_cache.server.key import KeyFields

DIGEST_BYTES = 32
MODEL_CHARS = 256
TARGET_CHARS = 64  # "cpu-avx512", "sm_90"; memos and the log of misses keep what was asked for.
_NAMESPACE = re.compile(r"[A-Za-z0-9._/-]{0,128}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A request that this daemon can answer."""

    key: KeyFields
    request: RequestFields
    request_bytes: bytes
    epoch: Epoch
    builder: Builder
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

    def __init__(self, targets: tuple[str, ...], builders: Builders) -> None:
        self.targets = targets
        self._builders = builders

    def admit(self, start: compile_pb2.CompileStart) -> Admitted:
        """Check the start of a Compile, against what builders have on their disks as they last looked.

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
        _check_facts(request)
        host = host_of(start.toolchain, any_wheel=start.allow_cpu_wheel_builds)
        builder = self._builders.choose(host, request.target)
        if builder is None:
            raise NotOnOfferError(
                "TOOLCHAIN_MISMATCH",
                self._builders.refusal(host, request.target),
                metadata={
                    "host": str(Toolchain.from_message(start.toolchain)),
                    "offer": self._builders.offer(),
                },
            )
        epoch = builder.epoch
        try:
            key = epoch.key_fields(
                request_digest=start.request_digest,
                namespace=start.namespace,
                target=request.target,
                passes=pass_config.active_passes(request.range),
            )
        except KeyError as error:
            raise InvalidRequestError("REQUEST_MALFORMED", f"pass_config: no pass {error} here") from error
        return Admitted(
            key=key,
            request=request,
            request_bytes=start.request,
            epoch=epoch,
            builder=builder,
            model=start.model,
        )


def _check_facts(request: RequestFields) -> None:
    try:
        if is_gpu_target(request.target):
            gpu_of(request.target, request.target_facts)
        elif request.target_facts:
            raise UnknownGpuError(f"{request.target} has no facts")
    except UnknownGpuError as error:
        raise InvalidRequestError("REQUEST_MALFORMED", f"target_facts: {error}") from error


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
