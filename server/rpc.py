"""What every method of our services does around its own work: deadlines, statuses, counters."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc.aio

from fuse_cache.server.cache.tier import TierUnavailableError
from fuse_cache.server.errors import InvalidRequestError, RequestError, UnavailableError, trailers
from fuse_cache.server.metrics import Metrics

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Answer = TypeVar("Answer")
# Typed loosely on purpose: the generated stubs type a streaming method as a generator, while grpc.aio also
# takes a coroutine that writes to its context, which is what bounds a slow reader to one chunk.
Wrapped = Callable[..., Any]


def fails_with_status(method: Callable[[Any, Any, Context], Awaitable[Answer]]) -> Wrapped:
    """Make a status of what a method raises, and count and time its calls."""
    name = method.__name__

    @functools.wraps(method)
    async def call(self: Any, request: Any, context: Context) -> Answer:
        metrics: Metrics = self._metrics
        began_s = time.perf_counter()
        try:
            answer = await method(self, request, context)
        except RequestError as error:
            raised = error
        except TierUnavailableError as error:
            raised = UnavailableError("STORE_FAILED", str(error))
        else:
            metrics.requests.labels(name, "OK").inc()
            metrics.seconds.labels(name).observe(time.perf_counter() - began_s)
            return answer
        metrics.requests.labels(name, raised.code.name).inc()
        await context.abort(raised.code, raised.message, trailers(raised))
        raise AssertionError("abort returned")

    return call


def needs_deadline(method: Callable[[Any, Any, Context], Awaitable[Answer]]) -> Wrapped:
    """Refuse a call without a deadline: its caller would wait for ever. Otherwise as `fails_with_status`."""

    @functools.wraps(method)
    async def call(self: Any, request: Any, context: Context) -> Answer:
        if context.time_remaining() is None:
            raise InvalidRequestError("DEADLINE_REQUIRED", "set a deadline on every call")
        return await method(self, request, context)

    return fails_with_status(call)
