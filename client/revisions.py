"""Whether this process takes tuned builds, and tells what it found out about kernel variants."""

from __future__ import annotations

import sys
from typing import Any

from fuse_cache.client.options import CompileOptions

ANY_REVISION = 2**32 - 1


def most_revision(options: CompileOptions) -> int:
    """Return the highest revision to ask for; 0: first builds only.

    Ranks of a process group ask at different times, and a tuned build may round sums in another order than
    the first one: all of a group use the first.
    """
    return ANY_REVISION if options.accept_revisions and not _in_a_group(options) else 0


def _in_a_group(options: CompileOptions) -> bool:
    if options.tp > 1:
        return True
    distributed: Any = sys.modules.get("torch.distributed")  # Not imported: then there is no group either.
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    return bool(distributed.get_world_size() > 1)
