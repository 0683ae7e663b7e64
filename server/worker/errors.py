"""Why a build fails, as the daemon tells its clients. Reasons are names of ErrorReason without its prefix."""

from __future__ import annotations

from fuse_cache.server.worker.protocol import BuildFailed


class NotCacheable(BuildFailed):
    """The graph compiles, but the result cannot be carried to another host. The client compiles it locally."""

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
