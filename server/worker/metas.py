"""What torch computes of a value here, compared with what the client's torch computed of it there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fuse_cache.kernels.fx_targets import DTYPES
from fuse_cache.proto.expression import Dim, evaluate
from fuse_cache.proto.graph import Meta, SymMeta, TensorMeta
from fuse_cache.server.worker.sizes import Size


def hint_of(size: Size) -> int:
    """Return the example value of a size."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    assert isinstance(hint, int)
    return hint


def meta_difference(value: object, sent: Meta, hints: Sequence[int]) -> str:
    """Say how a fake value differs from what the client's torch computed, or "" when it does not."""
    if isinstance(sent, tuple):
        if not isinstance(value, tuple | list) or len(value) != len(sent):
            return f"{type(value).__name__} instead of {len(sent)} results"
        parts = (meta_difference(part, meta, hints) for part, meta in zip(value, sent, strict=True))
        return next(filter(None, parts), "")
    if isinstance(sent, TensorMeta):
        if not isinstance(value, Tensor):
            return f"{type(value).__name__} instead of a tensor"
        pairs = (
            ("dtype", value.dtype, DTYPES[sent.dtype]),
            ("device", value.device.type, sent.device),
            ("size", _hints_of(value.shape), _evaluated(sent.size, hints)),
            ("stride", _hints_of(value.stride()), _evaluated(sent.stride, hints)),
            ("offset", _hints_of([value.storage_offset()]), _evaluated([sent.storage_offset], hints)),
        )
        return next((f"{what} {here}, sent {there}" for what, here, there in pairs if here != there), "")
    if isinstance(sent, SymMeta):
        if not isinstance(value, int | torch.SymInt):
            return f"{type(value).__name__} instead of a size"
        here, there = hint_of(value), evaluate(sent.value, hints)
        return "" if here == there else f"{here}, sent {there}"
    return ""


def _hints_of(sizes: Sequence[Size]) -> list[int]:
    return [hint_of(size) for size in sizes]


def _evaluated(dims: Sequence[Dim], hints: Sequence[int]) -> list[int]:
    return [evaluate(dim, hints) for dim in dims]
