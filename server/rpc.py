"""What every method of our services does around its own work: deadlines, statuses, counters."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import DecodeError

from fuse_cache.server.cache.tier import TierUnavailableError
from fuse_cache.server.errors import InvalidRequestError, RequestError, UnavailableError, trailers
from fuse_cache.server.metrics import Metrics
from fuse_cache.server.undecodable import CROWDED, UNDECODABLE

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Answer = TypeVar("Answer")
# Typed loosely on purpose: the generated stubs type a streaming method as a generator, while grpc.aio also
# takes a coroutine that writes to its context, which is what bounds a slow reader to one chunk.
Wrapped = Callable[..., Any]


def fails_with_status(method: Callable[[Any, Any, Context], Awaitable[Answer]]) -> Wrapped:
    """Make a status of what a method raises, and count and time its calls."""
    return _wrap(method, deadline=False)


def needs_deadline(method: Callable[[Any, Any, Context], Awaitable[Answer]]) -> Wrapped:
    """Refuse a call without a deadline: its caller would wait for ever. Otherwise as `fails_with_status`."""
    return _wrap(method, deadline=True)


def _wrap(method: Callable[[Any, Any, Context], Awaitable[Answer]], *, deadline: bool) -> Wrapped:
    name = {"lookup_bytes": "Lookup"}.get(method.__name__, method.__name__)

    @functools.wraps(method)
    async def call(self: Any, request: Any, context: Context) -> Answer:
        metrics: Metrics = self._metrics
        began_s = time.perf_counter()
        try:
            if request is UNDECODABLE:
                raise InvalidRequestError("REQUEST_MALFORMED", "the request is no message of its type")
            if request is CROWDED:
                raise InvalidRequestError("REQUEST_MALFORMED", "more items than any request has: 1,024")
            if deadline and context.time_remaining() is None:
                raise InvalidRequestError("DEADLINE_REQUIRED", "set a deadline on every call")
            answer = await method(self, request, context)
        except RequestError as error:
            raised = error
        except DecodeError as error:  # Of a message in a stream.
            raised = InvalidRequestError("REQUEST_MALFORMED", str(error))
        except TierUnavailableError as error:
            raised = UnavailableError("STORE_FAILED", str(error))
        except Exception as error:
            if context.cancelled() or context.done():
                raise  # A write to a caller who has gone: there is nobody to answer.
            log.exception("a call ended in a bug", extra={"method": name})
            raised = RequestError("INTERNAL", f"{type(error).__name__}: {error}")
        else:
            metrics.succeeded(name, time.perf_counter() - began_s)
            return answer
        metrics.requests.labels(name, raised.code.name).inc()
        code, message, details = raised.code, raised.message, trailers(raised)
        # Its traceback holds this frame: a circle that would keep the request until the collector comes by.
        del raised
        await context.abort(code, message, details)
        raise AssertionError("abort returned")

    return call
