"""One measured value beside its bar."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`value` in `unit`; `bar` is the most that it may be, or the least where `at_least`; None: none."""

    what: str
    value: float
    unit: str
    bar: float | None = None
    at_least: bool = False
    samples: list[float] = field(default_factory=list)

    @property
    def reached(self) -> bool | None:
        """Whether the bar is reached; None where there is none."""
        if self.bar is None:
            return None
        return self.value >= self.bar if self.at_least else self.value <= self.bar

    def text(self) -> str:
        """Return the value with its unit."""
        return f"{self.value:.3g} {self.unit}"

    def bar_text(self) -> str:
        """Return the bar for people."""
        return "" if self.bar is None else f"{'>=' if self.at_least else '<='} {self.bar:g} {self.unit}"


def median_row(what: str, samples: list[float], unit: str, bar: float | None = None) -> Row:
    """Return the row of the median of `samples`."""
    return Row(what=what, value=statistics.median(samples), unit=unit, bar=bar, samples=samples)
