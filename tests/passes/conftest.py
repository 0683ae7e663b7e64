"""Passes see graphs as workers make them: sizes of 1 are not told apart while tracing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fuse_cache.server.worker.rebuild import size_oblivious


@pytest.fixture(autouse=True)
def _as_in_workers() -> Iterator[None]:
    """Trace size-obliviously, whatever other tests of this process left."""
    with size_oblivious():
        yield
