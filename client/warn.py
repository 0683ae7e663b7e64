"""Warnings that would repeat with every graph, said once."""

from __future__ import annotations

import functools
import logging

_log = logging.getLogger("fuse_cache.client")


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning, once for each text in this process."""
    _log.warning(message)
