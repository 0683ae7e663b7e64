"""Recognises the two norms of vLLM's own IR, by name and argument names, where a process has registered them.

They are functional and mean their native implementations: computed in float32, rounded to the weight's dtype,
multiplied, rounded to that of x. The sum of an addition is rounded for who reads it, and not for the norm.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Final

import torch
from torch import fx
from torch._ops import OpOverload

from fuse_cache.kernels.fused_add_rms_norm.op import FUSED_ADD_RMS_NORM
from fuse_cache.kernels.rms_norm.op import RMS_NORM
from fuse_cache.passes.base import Reason
from fuse_cache.passes.raised import Found, Miss
from fuse_cache.passes.reading import FLOATS, dtype, number, tensor

_NORM: Final = "vllm_ir::rms_norm"
_ADD_NORM: Final = "vllm_ir::fused_add_rms_norm"
_ARGUMENTS: Final = {
    _NORM: ("x", "weight", "epsilon", "variance_size"),
    _ADD_NORM: ("x", "x_residual", "weight", "epsilon", "variance_size"),
}


def candidates(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield every call of these operators in the form that writes nothing."""
    for node in graph.nodes:
        schema = node.target._schema if isinstance(node.target, OpOverload) else None
        if schema is not None and schema.name in _ARGUMENTS and not schema.is_mutable:
            yield node


def recognise(node: fx.Node) -> Found | Miss | None:
    """Read a call."""
    target = node.target
    assert isinstance(target, OpOverload)
    name = target._schema.name
    names = tuple(argument.name for argument in target._schema.arguments)
    if names != _ARGUMENTS[name]:
        return Miss(Reason.OTHER_SPELLING, f"{name} has the arguments {', '.join(names)}, unknown here")
    given = {argument.name: argument.default_value for argument in target._schema.arguments}
    given.update(zip(names, node.args, strict=False))
    given.update(node.kwargs)
    if given["variance_size"] is not None:
        detail = f"{name} with variance_size={given['variance_size']}: a part of the row is not known here"
        return Miss(Reason.OP_MISSING, detail)
    x, weight, eps = given["x"], given["weight"], number(given["epsilon"])
    kind, weight_kind = dtype(x), None if weight is None else dtype(weight)
    if kind not in FLOATS or (weight is not None and weight_kind not in FLOATS) or eps is None:
        return Miss(Reason.DTYPE, f"{name} of {kind} with a weight of {weight_kind} is not known here")
    # Before the weight, and once more behind it where that changes the dtype; without a weight only once.
    before = None if weight is None else _none_if_wide(weight_kind)
    behind = _none_if_wide(kind) if weight is None else None if weight_kind == kind else kind
    attributes = (eps, 0.0, None, before, behind)
    if name == _NORM:
        value = tensor(node)
        if value is None or value.dtype != kind:
            return Miss(Reason.DTYPE, f"{name} gives {dtype(node)} for {kind}: another release's roundings")
        return Found(RMS_NORM, (x, weight, *attributes), (node,))
    residual = given["x_residual"]
    if dtype(residual) not in FLOATS:
        return Miss(Reason.DTYPE, f"{name} of a residual of {dtype(residual)} is not known here")
    items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if len(items) < len(node.users):
        return Miss(Reason.EXTRA_USER, f"{name}'s results are taken another way or twice")
    if not items:
        return None
    if any(dtype(item) != kind for item in items.values()):
        return Miss(Reason.DTYPE, f"{name} gives other dtypes than {kind}: another release's roundings")
    arguments = (x, residual, weight, *attributes, kind, False)
    return Found(FUSED_ADD_RMS_NORM, arguments, (items.get(0), items.get(1)))


def _none_if_wide(kind: torch.dtype | None) -> torch.dtype | None:
    return None if kind == torch.float32 else kind
