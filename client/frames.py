"""Whose graph Dynamo hands over: that of the function the user compiled, or of a piece of a broken one.

Where Dynamo cannot go on, it ends a graph, and what follows is compiled as functions of its own: the rest of
the function ("torch_dynamo_resume_in_..."), and the functions it calls. Their inputs have other names.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import FrameType
from typing import Final

import torch
from torch._guards import TracingContext

_TORCH: Final = str(Path(torch.__file__).parent)
_TRANSPARENT: Final = (_TORCH, contextlib.__file__)  # Decorators of functions are contextlib's, in part.
_CONVERT: Final = str(Path(_TORCH, "_dynamo", "convert_frame.py"))
_ENTRY: Final = str(Path(_TORCH, "_dynamo", "eval_frame.py"))
_RESUMED: Final = "torch_dynamo_resume_in_"


def is_users_own_function() -> bool:
    """Say whether the graph in hand is of the function that the user gave to torch.compile, from its start.

    To be called inside the backend. True as well where Dynamo is not at work: then the caller's graph is all
    there is. Between Dynamo and its own entry stand only functions of torch (`Module.__call__`), unless code
    that was compiled before called the one being compiled: that is in the middle of a broken function.
    """
    context = TracingContext.try_get()
    traced = getattr(context, "traced_code", None)
    if traced and traced[0].co_name.startswith(_RESUMED):
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != _CONVERT:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename != _ENTRY:
        if not frame.f_code.co_filename.startswith(_TRANSPARENT):
            return False
        frame = frame.f_back
    return True
