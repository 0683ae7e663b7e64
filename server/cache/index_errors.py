"""What stops a call of the index, named by what the caller must do; and how SQLite's many errors become these
few.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator

import diskcache


class IndexProblem(Exception):  # the base; the four below say what to do
    """Base of what an index call can raise beside the OSError of a file."""


class IndexBrokenError(IndexProblem):
    """The database is damaged: rebuild it from the files."""


class IndexBusyError(IndexProblem):
    """Another process held the database for longer than our time-out."""


class IndexFullError(IndexProblem):
    """The file system has no room for what the database must write."""


class IndexReadOnlyError(IndexProblem):
    """The database may not be written."""


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Turn what SQLite and diskcache raise into what the caller must do.

    An OSError is a file's, and passes.
    """
    try:
        yield
    except (OSError, IndexProblem):
        raise
    except diskcache.Timeout as error:
        # diskcache raises Timeout for whatever keeps a transaction from beginning; the cause is in the
        # context.
        cause = error.__context__
        raise _kind_of(
            cause if isinstance(cause, sqlite3.Error) else sqlite3.OperationalError("locked")
        ) from error
    except Exception as error:
        # Damage shows in many ways: DatabaseError, but also ValueError, KeyError or TypeError from rows that
        # make no sense.
        raise _kind_of(error) from error


def _kind_of(error: Exception) -> Exception:
    text = str(error).lower()
    if isinstance(error, sqlite3.OperationalError):
        if "locked" in text or "busy" in text:
            return IndexBusyError(text)
        if "full" in text:
            return IndexFullError(text)
        if "readonly" in text or "read-only" in text:
            return IndexReadOnlyError(text)
    return IndexBrokenError(f"{type(error).__name__}: {text}")
