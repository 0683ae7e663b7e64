"""Fields of JSON objects from a process that is not trusted: of the right type and in bounds, or an error."""

from __future__ import annotations

import json
import math
from pathlib import Path

MAX_REPORT_BYTES = 16 * 1024 * 1024  # built.json: 100 passes and 10,000 near misses of 1 KiB each, and room.


class ProtocolError(ValueError):
    """A file or a line of the other side is not what protocol.py writes."""


def read_object(path: Path) -> dict[str, object]:
    """Read a small JSON object. Raises: ProtocolError."""
    try:
        if path.stat().st_size > MAX_REPORT_BYTES:
            raise ProtocolError(f"{path.name} is larger than {MAX_REPORT_BYTES} bytes")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ProtocolError(f"the worker left no {path.name}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{path.name} is not JSON") from error
    if not isinstance(value, dict):
        raise ProtocolError(f"{path.name} is not an object")
    return value


def objects(report: dict[str, object], name: str) -> list[dict[str, object]]:
    """Return a field that is a list of objects. Raises: ProtocolError."""
    value = report.get(name)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ProtocolError(f"{name} is not a list of objects")
    return value


def text(item: dict[str, object], name: str, default: str | None = None) -> str:
    """Return a field that is a text. Raises: ProtocolError."""
    value = item.get(name, default)
    if not isinstance(value, str):
        raise ProtocolError(f"{name} is not a text")
    return value


def flag(item: dict[str, object], name: str, default: bool | None = None) -> bool:
    """Return a field that is true or false. Raises: ProtocolError."""
    value = item.get(name, default)
    if not isinstance(value, bool):
        raise ProtocolError(f"{name} is not true or false")
    return value


def count(item: dict[str, object], name: str, default: int | None = None) -> int:
    """Return a field that is an integer of 0 to 2**63. Raises: ProtocolError."""
    value = item.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ProtocolError(f"{name} is not a count")
    return value


def number(item: dict[str, object], name: str, default: float | None = None) -> float:
    """Return a field that is a finite number of at least 0. Raises: ProtocolError."""
    value = item.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ProtocolError(f"{name} is not a number of at least 0")
    return float(value)
