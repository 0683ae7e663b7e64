"""What recognisers say about a candidate: the operator that means the same, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx
from torch._ops import OpOverload

from fuse_cache.passes.base import Reason


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a candidate is not what it looks like."""

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class Found:
    """A recognised operator: `arguments` are all of its arguments by position.

    `results` holds, for each of its results, the node that computes it now; None where no node does. A node's
    sizes may differ from the result's by a reshape, and its dtype by a cast that loses nothing.
    """

    operator: OpOverload
    arguments: tuple[object, ...]
    results: tuple[fx.Node | None, ...]
