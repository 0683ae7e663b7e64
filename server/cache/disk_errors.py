"""What an OSError of an entry file means to the caller of the disk tier."""

from __future__ import annotations

import errno
import os

from fuse_cache.server.cache.folder import FULL_ERRNOS, READ_ONLY_ERRNOS
from fuse_cache.server.cache.tier import TierError, TierUnavailableError, WriteLostError


def outage_of(tier: str, error: OSError) -> TierUnavailableError:
    """A file could not be read, and not because it is not there."""
    where = f": {error.filename}" if error.filename else ""
    return TierUnavailableError(tier, f"{os.strerror(error.errno or errno.EIO)}{where}")


def write_error_of(tier: str, error: OSError) -> TierError:
    """A file could not be written or deleted: full and read-only lose the write, all else is an outage."""
    if error.errno in FULL_ERRNOS:
        return WriteLostError(tier, "the disk is full")
    if error.errno in READ_ONLY_ERRNOS:
        return WriteLostError(tier, "the store folder cannot be written")
    return outage_of(tier, error)
