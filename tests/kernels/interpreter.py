"""Runs kernels under Triton's interpreter, with its conversions put right. Imported before any kernel.

Its own conversions cut bfloat16 off instead of rounding, and lose the carry of e4m3: PyTorch's are used.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import torch

if "triton.language" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("triton was imported before TRITON_INTERPRET=1 was set: run these tests on their own")
os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl
from triton.runtime import interpreter

_TORCH = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_BITS = {
    torch.float32: np.uint32,
    torch.float16: np.uint16,
    torch.bfloat16: np.uint16,
    torch.float8_e4m3fn: np.uint8,
}


def _convert(values: Any, source: Any, goal: Any, rounding: Any) -> Any:
    """Convert between the formats above, bits in and bits out, as PyTorch casts."""
    kind = _TORCH[source.scalar]
    bits = np.ascontiguousarray(values).view(_BITS[kind])
    tensor = torch.from_numpy(bits.astype(bits.dtype)).view(kind)
    result = tensor.to(_TORCH[goal.scalar])
    return result.view(getattr(torch, np.dtype(_BITS[result.dtype]).name)).numpy()


interpreter._convert_float = _convert

# The interpreter puts its versions of triton.language's functions in place at each call of a device function,
# which takes more than half of the time. Once for each launch is enough.
_patch_lang = interpreter._patch_lang
_patched: set[int] = set()


class _Launch:
    """What a launch put in place."""

    def __init__(self, scope: Any) -> None:
        self._scope = scope

    def restore(self) -> None:
        """Put the originals back."""
        self._scope.restore()
        _patched.clear()


def _patch_once(function: Any) -> Any:
    modules = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
    if modules <= _patched:
        return interpreter._LangPatchScope()
    _patched.update(modules)
    scope = _patch_lang(function)
    # Triton 3.6 converts a loop's bounds, arrays of one element, in a way that new numpy refuses.
    scope.set_attr(tl.tensor, "__index__", lambda value: int(value.handle.data.squeeze()))
    return _Launch(scope)


interpreter._patch_lang = _patch_once
