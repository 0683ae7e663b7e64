"""What became of a warm run: one outcome for each artifact that hosts will ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from fuse_cache.proto.request import Range, Scalar

State = Literal["stored", "compiled", "missing", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one artifact. "missing": it is not there, and nothing was to be compiled."""

    model: str
    target: str
    target_facts: tuple[tuple[str, Scalar], ...]
    compile_range: Range
    toolchain: str  # the builder's name
    state: State
    key: bytes = b""
    bytes: int = 0
    seconds: float = 0.0  # what compiling it took, now or when it was
    reason: str = ""


@dataclass(slots=True)
class Summary:
    """All outcomes. `failures` are models of which nothing could be asked, with the reason; `local` are
    graphs that every host compiles itself, with the reason."""

    outcomes: list[Outcome] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    local: dict[str, list[str]] = field(default_factory=dict)

    def count(self, state: State) -> int:
        """Return how many have come to this."""
        return sum(outcome.state == state for outcome in self.outcomes)

    @property
    def complete(self) -> bool:
        """Whether a host will find all that it can ask for."""
        return not (self.failures or self.count("failed") or self.count("missing"))


class Listener(Protocol):
    """Hears how a run goes. Called from one thread."""

    def tracing(self, model: str, device: str) -> None:
        """A model is about to be traced."""

    def traced(self, model: str, artifacts: int, stored: int) -> None:
        """A model was traced: so many artifacts, of which so many are stored already."""

    def heard(self, outcome: Outcome) -> None:
        """One artifact has come to an end."""

    def failed(self, model: str, reason: str) -> None:
        """Nothing can be asked for a model."""
