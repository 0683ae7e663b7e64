"""What a caller of the client can catch. One class per decision of the caller; each names what to do next."""

from __future__ import annotations

from collections.abc import Sequence


class FuseCacheError(Exception):
    """Anything this package raises on purpose."""


class OptionError(FuseCacheError, ValueError):
    """An option is unknown or wrong. The message names it and what is allowed: fix the call."""


class DaemonUnavailableError(FuseCacheError):
    """No daemon could be asked, or it stopped answering: compile locally."""


class DaemonTooLateError(DaemonUnavailableError):
    """The daemon fell silent within a call, or used up all the time it was given: waiting on would break the
    bound."""


class DaemonRefusedError(FuseCacheError):
    """The daemon answered, and said no. Asking again gives the same answer: compile locally.

    `reason` is a name of proto's ErrorReason without its prefix, or the name of a gRPC status code.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message if reason == "UNSPECIFIED" else f"{reason}: {message}")
        self.reason = reason
        self.message = message


class ArtifactRejectedError(FuseCacheError):
    """An artifact failed a check before anything in it was deserialised. It is set aside and compiled again.

    `verdict` is a name of proto's Verdict without its prefix: BAD_SIGNATURE, WRONG_MANIFEST, BAD_DIGEST.
    """

    def __init__(self, verdict: str, message: str) -> None:
        super().__init__(message)
        self.verdict = verdict


class RemoteCompileError(FuseCacheError):
    """mode="remote" was asked for and the daemon could not answer. Look at the daemon, or use mode="auto"."""


class FusionMissedError(FuseCacheError):
    """strict=True, and a pass that `pass_config` names matched nothing. The message has its near misses."""

    def __init__(self, passes: Sequence[str], details: Sequence[str]) -> None:
        shown = "; ".join(details) if details else "no candidate was found in the graph"
        super().__init__(
            f"strict: {', '.join(passes)} matched nothing ({shown}). "
            "Run `fuse-cache explain fusions`, or drop strict or the field of pass_config."
        )
        self.passes = tuple(passes)
