"""Why a build fails, as the daemon tells its clients. Reasons are names of ErrorReason without its prefix."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from fuse_cache.passes.base import PassError
from fuse_cache.server.worker.protocol import BuildFailed


class NotCacheable(BuildFailed):
    """The graph compiles, but its result cannot travel to another host. The client compiles it locally."""

    def __init__(self, message: str, *, stage: str = "inductor") -> None:
        super().__init__("NOT_CACHEABLE", message, stage=stage)


class CompilerRaised(BuildFailed):
    """Inductor, or the C++ compiler under it, refused the graph."""

    def __init__(self, message: str, *, stage: str = "inductor", deterministic: bool = True) -> None:
        super().__init__("COMPILE_FAILED", message, stage=stage, deterministic=deterministic)


class TargetUnavailable(BuildFailed):
    """Nobody here builds for that target."""

    def __init__(self, message: str) -> None:
        super().__init__("TARGET_UNAVAILABLE", message, stage="rebuild")


def translate(error: BaseException, stage: str) -> BuildFailed:
    """Return what the daemon is to say of an exception that the compiler raised.

    A graph that torch's caches pass over has no record to carry; an exhausted machine is not the graph's
    fault.
    """
    for cause in _causes(error):
        if isinstance(cause, BuildFailed):
            return cause
        if isinstance(cause, PassError):
            return CompilerRaised(str(cause), stage="passes")
        name = type(cause).__name__
        if name.startswith("Bypass"):
            return NotCacheable(f"torch keeps no record of this graph: {_first_line(cause)}", stage=stage)
        if isinstance(cause, MemoryError):
            return BuildFailed(
                "OUT_OF_MEMORY", "the compiler ran out of memory", stage=stage, deterministic=False
            )
        if isinstance(cause, OSError):
            message = f"{cause.strerror or cause}: {cause.filename or ''}".rstrip(": ")
            return CompilerRaised(message, stage=stage, deterministic=False)
        if name == "CppCompileError" and os.strerror(errno.ENOSPC) in str(cause):
            # The C++ compiler met the full disk, and its words are all that is left of it.
            return CompilerRaised(os.strerror(errno.ENOSPC), stage=stage, deterministic=False)
    return CompilerRaised(f"{type(error).__name__}: {error}", stage=stage)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        # Inductor and Dynamo wrap what they catch in exceptions that carry it as `inner_exception`.
        current = getattr(current, "inner_exception", None) or current.__cause__ or current.__context__


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
