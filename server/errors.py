"""What can go wrong for a caller: one class per decision, and one place that makes a gRPC status of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "fuse-cache"
# A status travels in HTTP/2 headers, 8 KiB in all: what a caller sent must not come back whole. The message
# goes twice, once of it in base64.
MESSAGE_CHARS = 1000
METADATA_CHARS = 250


class RequestError(Exception):
    """A call that ends with a status.

    `reason` is an ErrorReason without its prefix; `retry_after_s` None: do not retry.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        retry_after_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = _header_text(message, MESSAGE_CHARS)
        self.retry_after_s = retry_after_s
        self.metadata = {name: _header_text(text, METADATA_CHARS) for name, text in (metadata or {}).items()}


class InvalidRequestError(RequestError):
    """The request can never succeed as it is. The caller must not repeat it."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class NotOnOfferError(RequestError):
    """Nobody here builds for that target or toolchain. The caller compiles locally or asks elsewhere."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class DamagedUploadError(RequestError):
    """The bytes that came are not those that were announced. The caller may send them again."""

    code = grpc.StatusCode.DATA_LOSS


class BusyError(RequestError):
    """A queue or a budget is full. The caller waits `retry_after_s`, or compiles locally."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class UnavailableError(RequestError):
    """Draining, or something the call needs is away. The caller asks another endpoint or compiles locally."""

    code = grpc.StatusCode.UNAVAILABLE


class NotFoundError(RequestError):
    """Nothing of that name is here, or not in this namespace. The caller looks up again."""

    code = grpc.StatusCode.NOT_FOUND


class OutOfRangeError(RequestError):
    """An offset that content does not have."""

    code = grpc.StatusCode.OUT_OF_RANGE


class DeniedError(RequestError):
    """The caller may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class AmbiguousError(RequestError):
    """A prefix that names several things. The caller writes more of it."""

    code = grpc.StatusCode.FAILED_PRECONDITION


def _header_text(text: str, limit: int) -> str:
    plain = text.encode("ascii", "backslashreplace").decode()
    return plain if len(plain) <= limit else plain[: limit - 3] + "..."


def to_status(error: RequestError) -> status_pb2.Status:
    """Return the google.rpc.Status of an error, with ErrorInfo and, where a retry makes sense, RetryInfo."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    details = [any_pb2.Any()]
    details[0].Pack(info)
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(any_pb2.Any())
        details[1].Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status_pb2.Status(code=error.code.value[0], message=error.message, details=details)


def trailers(error: RequestError) -> tuple[tuple[str, bytes], ...]:
    """Return the trailing metadata that carries the details of an error, as rpc_status reads it."""
    return (("grpc-status-details-bin", to_status(error).SerializeToString()),)
