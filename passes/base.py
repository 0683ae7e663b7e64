"""What a pass is, and what it tells about its work."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import fx


class Reason(enum.StrEnum):
    """Why a candidate was not fused. The values are part of the report."""

    CAST_BETWEEN = "cast_between"
    OTHER_SPELLING = "other_spelling"
    EXTRA_VIEW = "extra_view"
    EXTRA_USER = "extra_user"
    DTYPE = "dtype"
    SHAPE = "shape"
    SIZE_BURNT_IN = "size_burnt_in"
    RANGE = "range"
    TARGET = "target"
    OP_MISSING = "op_missing"
    GUARD = "guard"
    NO_PARTNER = "no_partner"  # Nothing beside it that it could be fused with.


class PassError(Exception):
    """A pass failed. It is a bug of ours: the compilation fails and names the pass, and a local build does
    without passes.
    """

    def __init__(self, pass_name: str, message: str) -> None:
        super().__init__(f"pass {pass_name}: {message}")
        self.pass_name = pass_name


def pass_error(error: BaseException) -> PassError | None:
    """Return the failure of a pass under an exception of Inductor's or Dynamo's, which wrap what they
    catch."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if isinstance(current, PassError):
            return current
        seen.add(id(current))
        current = getattr(current, "inner_exception", None) or current.__cause__ or current.__context__
    return None


@dataclass(frozen=True, slots=True)
class NearMiss:
    """A candidate that no pattern took: which pass looked, why not, at which node, in words."""

    pass_name: str
    reason: Reason
    node: str
    detail: str


@dataclass(slots=True)
class Outcome:
    """What one run of a pass did. `bytes_saved` estimates traffic per call, 0 where sizes are symbolic."""

    candidates: int = 0
    matches: int = 0
    bytes_saved: int = 0
    near_misses: list[NearMiss] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a pass may ask about the compilation. All of it is in the pass's id (`manager.py`)."""

    target: str

    @property
    def family(self) -> str:
        """Return "cpu" for "cpu-avx2", "sm" for "sm_90"."""
        return self.target.replace("_", "-").split("-", 1)[0]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A rewrite in words of PyTorch: dumped for people, and run by the tests on `example_inputs`.

    `search` and `replacement` take the same tensors and compute the same bits.
    """

    name: str
    search: Callable[..., object]
    replacement: Callable[..., object]
    example_inputs: Callable[[], tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass is a value. `run` changes the graph in place and leaves it legal (`verify.py`)."""

    name: str
    run: Callable[[fx.Graph, Setting], Outcome]
    patterns: tuple[Pattern, ...] = ()
