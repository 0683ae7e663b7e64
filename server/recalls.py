"""Recalled builders, kept beside the artifacts that they concern (DECISIONS/0051).

One empty file per builder, `<store>/recalled/<builder id>`: daemons that share a store add to it without
reading it first, and nothing can be half written. The list only grows.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

FOLDER = "recalled"
MOST = 100_000  # Names that are read: 36 bytes each travel in Capabilities.
_BUILDER = re.compile(r"[0-9a-f]{32}")


def is_builder_id(text: str) -> bool:
    """Tell whether `text` has the form of a builder's id: 32 small hex digits."""
    return _BUILDER.fullmatch(text) is not None


class Recalls:
    """The list of one store folder."""

    def __init__(self, store: Path) -> None:
        self._folder = store / FOLDER

    def read(self) -> frozenset[str]:
        """Return the ids of all recalled builders; none while the folder cannot be read. Blocking."""
        try:
            names = os.listdir(self._folder)
        except OSError:
            return frozenset()
        return frozenset(sorted(filter(is_builder_id, names))[:MOST])

    def add(self, builder: str) -> None:
        """Recall a builder for good. Blocking.

        Raises:
            ValueError: no builder has such an id.
            OSError: it cannot be written down: a restart would forget it.
        """
        if not is_builder_id(builder):
            raise ValueError(
                f"{builder!r} is no builder id: 32 hex digits, as `fuse-cache ls --json` shows them"
            )
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._folder / builder, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.close(descriptor)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)  # A recall is for an emergency: it must not be lost with the power.
        finally:
            os.close(folder)
