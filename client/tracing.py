"""How Dynamo treats the sizes 0 and 1 while this backend is in use (DECISIONS/0003).

The first trace of a function is size-oblivious: its graph serves size 1 like any other. A re-trace is not: it
happens because the program itself tells sizes apart ("is this a decode step?"), and then a size of 1 is what
torch makes of it, a constant. `FUSE_CACHE_SIZE_OBLIVIOUS=0` lets no trace be size-oblivious: torch 2.11
refuses some programs then that it compiles otherwise (DECISIONS/0006).
"""

from __future__ import annotations

from typing import Any

import torch.fx.experimental._config as symbolic_config
from torch._dynamo.callback import callback_handler

from fuse_cache.client.settings import wants_one_graph_for_size_one


def trace_size_obliviously() -> None:
    """Make the first trace of every function of this process size-oblivious. To be called before it, and as
    often as one likes."""
    _set(True)
    if _before_trace not in callback_handler.start_callbacks:  # torch._dynamo.reset() forgets them.
        callback_handler.register_start_callback(_before_trace)
        callback_handler.register_end_callback(_after_trace)


def _before_trace(args: Any) -> None:
    _set(not _is_retrace(str(getattr(args, "compile_id", ""))))


def _after_trace(args: Any) -> None:
    _set(True)


def _is_retrace(compile_id: str) -> bool:
    """Tell whether a compile id ("frame/number", "[autograd]frame/number_restart") is not a function's
    first."""
    number = compile_id.rpartition("/")[2].partition("_")[0]
    return number.isdigit() and int(number) > 0


def _set(oblivious: bool) -> None:
    symbolic_config.backed_size_oblivious = oblivious and wants_one_graph_for_size_one()
