"""What can be wrong with bytes from outside. One class per decision of the reader."""

from __future__ import annotations

import enum


class GraphReason(enum.StrEnum):
    """Why a graph is refused: the names of `ErrorReason` in compile.proto, without their prefix."""

    MALFORMED = "GRAPH_MALFORMED"  # not a graph, or not in canonical form
    TOO_LARGE = "GRAPH_TOO_LARGE"  # beyond a limit, which the message names
    UNKNOWN_TARGET = "TARGET_OP_UNKNOWN"  # calls something outside the closed table


class GraphError(ValueError):
    """The graph cannot be sent or taken. Never retried: the same graph gives the same answer."""

    def __init__(self, reason: GraphReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class RequestError(ValueError):
    """The bytes are not a canonical request."""


class ContainerError(ValueError):
    """The bytes are not a whole artifact container. A miss for whoever read them from a store."""


class ContentError(ValueError):
    """Content does not fit its digests. A miss, counted as corrupt."""


class TrustError(RuntimeError):
    """The trust folder cannot be used; the message says what to change."""


class ToolchainError(RuntimeError):
    """The installed software cannot be told apart from other software."""
