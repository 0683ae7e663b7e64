"""How recognisers read an ATen graph: values, casts, constants."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable
from typing import TypeGuard

import torch
from torch import fx
from torch._ops import OpOverload

aten = torch.ops.aten
prims = torch.ops.prims

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
LOW_PRECISION = frozenset({torch.bfloat16, torch.float16})
FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz})
RESHAPES = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
    }
)


def is_call(node: object, targets: Container[OpOverload] | OpOverload) -> TypeGuard[fx.Node]:
    """Return whether the argument is a call of this operator, or of one of these."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    return node.target == targets if isinstance(targets, OpOverload) else node.target in targets


def tensor(node: object) -> torch.Tensor | None:
    """Return the fake tensor that a node computes, None for anything else."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def dtype(node: object) -> torch.dtype | None:
    """Return the dtype of the tensor that a node computes."""
    value = tensor(node)
    return None if value is None else value.dtype


def cast_source(node: object) -> fx.Node | None:
    """Return what a node casts to another dtype on the same device, None if it is no cast."""
    if is_call(node, prims.convert_element_type.default):
        source = node.args[0]
        return source if isinstance(source, fx.Node) else None
    if is_call(node, aten._to_copy.default) and set(node.kwargs) <= {"dtype"}:
        source = node.args[0]
        return source if isinstance(source, fx.Node) else None
    return None


def widened_from(node: fx.Node) -> fx.Node:
    """Look through a cast of bfloat16 or float16 to float32, which loses nothing."""
    source = cast_source(node)
    if source is not None and dtype(node) == torch.float32 and dtype(source) in LOW_PRECISION:
        return source
    return node


def reshape_source(node: object) -> fx.Node | None:
    """Return what a node reshapes, None if it is no reshape."""
    if is_call(node, RESHAPES):
        source = node.args[0]
        return source if isinstance(source, fx.Node) else None
    return None


def number(argument: object) -> float | None:
    """Return a constant number as a float, None for anything else."""
    if isinstance(argument, (int, float)) and not isinstance(argument, bool):
        return float(argument)
    return None


def only_user(node: fx.Node) -> fx.Node | None:
    """Return the one node that reads this one, None if there are several or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def split_operands(node: fx.Node, known: fx.Node) -> object:
    """Return the other operand of a binary node of which `known` is one."""
    left, right = node.args[0], node.args[1]
    return right if left is known else left


def has_one_element(value: torch.Tensor) -> bool:
    """Return whether the tensor has exactly one element, whatever its symbolic sizes are. Adds no guard."""
    return all(size == 1 if isinstance(size, int) else size.node.maybe_as_int() == 1 for size in value.shape)


def is_symbolic(node: fx.Node) -> bool:
    """Return whether a size of the tensor is not known yet."""
    value = tensor(node)
    return value is None or any(isinstance(size, torch.SymInt) for size in value.shape)


def is_exact_in(number_: float, kind: torch.dtype) -> bool:
    """Return whether the dtype holds this number without rounding."""
    return torch.tensor(number_, dtype=torch.float64).to(kind).to(torch.float64).item() == number_


def size_bytes(node: fx.Node) -> int:
    """Return the bytes of the tensor, 0 where a size is symbolic."""
    value = tensor(node)
    if value is None or is_symbolic(node):
        return 0
    count = 1
    for size in value.shape:
        count = operator.mul(count, int(size))
    return count * value.element_size()


def layout_key(value: torch.Tensor) -> tuple[object, ...]:
    """Return what fake computations on a tensor of this graph depend on."""
    offset = sizes_key((value.storage_offset(),))
    return value.dtype, value.device, sizes_key(value.shape), sizes_key(value.stride()), offset


def sizes_key(sizes: Iterable[int | torch.SymInt]) -> tuple[object, ...]:
    """Return sizes as values that are equal where the sizes are written alike, and that can be hashed."""
    return tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes)
