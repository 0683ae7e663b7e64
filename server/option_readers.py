"""What reads one value of an option, from TOML, a text of the environment, or the command line.

Each returns the value in its type, or says in a ValueError what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_BOOLEANS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def number(kind: type[int] | type[float], *, least: float, most: float = math.inf) -> Callable[[object], Any]:
    """Return what reads a number between `least` and `most`, from TOML, a text, or the command line."""

    def read(value: object) -> int | float:
        name = "an integer" if kind is int else "a number"
        try:
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise ValueError
            found = kind(value)
            if isinstance(value, float) and kind is int and found != value:
                raise ValueError
        except (ValueError, OverflowError):
            raise ValueError(f"must be {name}, not {value!r}") from None
        if not found >= least:  # Not a number is not either.
            raise ValueError(f"must be greater than or equal to {least:g}, not {value}")
        if found > most:
            raise ValueError(f"must be at most {most:g}, not {value}")
        return found

    return read


def boolean(value: object) -> bool:
    """Read true or false."""
    found = value if isinstance(value, bool) else _BOOLEANS.get(str(value).strip().lower())
    if found is None:
        raise ValueError(f"must be true or false, not {value!r}")
    return found


def text(value: object) -> str:
    """Read a text as it is."""
    if not isinstance(value, str):
        raise ValueError(f"must be a text, not {value!r}")
    return value


def path(value: object) -> Path:
    """Read a path, which need not exist."""
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be a path, not {value!r}")
    return Path(value)


def one_of(*names: str) -> Callable[[object], str]:
    """Return what reads one of these names."""

    def read(value: object) -> str:
        if value not in names:
            raise ValueError(f"must be one of {', '.join(names)}, not {value!r}")
        return str(value)

    return read


def list_of(read_one: Callable[[object], T]) -> Callable[[object], tuple[T, ...]]:
    """Return what reads a list, or one text with commas, of such values."""

    def read(value: object) -> tuple[T, ...]:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        if not isinstance(value, list | tuple):
            raise ValueError(f"must be a list, not {value!r}")
        return tuple(read_one(part) for part in value)

    return read
