"""Reads SiLU and both forms of GELU off their decompositions, as they stand in the joint graph."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import fx

from fuse_cache.kernels.act_and_mul.reference import GELU, GELU_TANH, SILU, SWISH
from fuse_cache.passes.base import Reason
from fuse_cache.passes.raised import Miss
from fuse_cache.passes.reading import (
    FLOATS,
    LOW_PRECISION,
    aten,
    cast_source,
    dtype,
    is_call,
    number,
    only_user,
    split_operands,
    widened_from,
)

# The function around which each activation stands.
ANCHORS = (aten.exp.default, aten.sigmoid.default, aten.erf.default, aten.tanh.default)


@dataclass(frozen=True, slots=True)
class Activation:
    """`name` of the gate, its roundings, and the node that computes it.

    `obstacle` says why it is none of ours although it looks like it: it counts where it gates something.
    """

    name: str
    gate: fx.Node
    last: fx.Node
    sigmoid_dtype: torch.dtype | None = None
    act_dtype: torch.dtype | None = None
    obstacle: Miss | None = None


def read_activation(anchor: fx.Node) -> Activation | Miss | None:
    """Read the activation around its function. None: it is something else, a softmax for one."""
    if anchor.target == aten.exp.default:
        return _silu(anchor)
    if anchor.target == aten.sigmoid.default:
        return _swish(anchor)
    return _gelu(anchor)


def _silu(exp: fx.Node) -> Activation | None:
    """g / (1 + exp(-g))."""
    negated, shifted = exp.args[0], only_user(exp)
    if (
        not is_call(negated, aten.neg.default)
        or shifted is None
        or not _is_scalar(shifted, aten.add.Tensor, 1.0)
    ):
        return None
    gate, quotient = negated.args[0], only_user(shifted)
    if not is_call(quotient, aten.div.Tensor) or quotient.args[1] is not shifted:
        return None
    if not isinstance(gate, fx.Node) or quotient.args[0] is not gate:
        return None
    if dtype(gate) != torch.float32:
        return _with_tail(SILU, gate, quotient, obstacle=_rounds_inside(dtype(gate)))
    return _with_tail(SILU, gate, quotient)


def _swish(sigmoid: fx.Node) -> Activation | None:
    """g * sigmoid(g), with the roundings of whoever wrote it out."""
    gate, factor = sigmoid.args[0], sigmoid
    sigmoid_dtype: torch.dtype | None = None
    user = only_user(sigmoid)
    if user is not None and cast_source(user) is sigmoid and dtype(user) in FLOATS:
        factor, user = user, only_user(user)
        sigmoid_dtype = dtype(factor) if dtype(factor) in LOW_PRECISION else None
    if not is_call(user, aten.mul.Tensor) or not isinstance(gate, fx.Node):
        return None
    other = split_operands(user, factor)
    if not isinstance(other, fx.Node):
        return None
    if widened_from(other) is not widened_from(gate):
        return _scaled_swish(gate, widened_from(other), user)
    if dtype(sigmoid) in LOW_PRECISION:
        sigmoid_dtype = dtype(sigmoid)
    base = widened_from(gate)
    if dtype(user) in LOW_PRECISION:
        return Activation(SWISH, base, user, sigmoid_dtype, dtype(user))
    if dtype(user) != torch.float32:
        return _with_tail(SWISH, base, user, obstacle=_rounds_inside(dtype(user)))
    return _with_tail(SWISH, base, user, sigmoid_dtype)


def _scaled_swish(argument: fx.Node, gate: fx.Node, product: fx.Node) -> Activation | None:
    """g * sigmoid(1.702 * g) is a GELU of its own."""
    is_scaled = is_call(argument, aten.mul.Tensor) and number(argument.args[1]) is not None
    source = argument.args[0] if is_scaled else None
    if not isinstance(source, fx.Node) or widened_from(source) is not gate:
        return None
    obstacle = Miss(Reason.OTHER_SPELLING, f"the argument of the sigmoid is scaled by {argument.args[1]}")
    return _with_tail(SWISH, gate, product, obstacle=obstacle)


def _gelu(anchor: fx.Node) -> Activation | None:
    """g / 2 * (1 + f(...)), f being erf or tanh."""
    shifted = only_user(anchor)
    if shifted is None or not _is_scalar(shifted, aten.add.Tensor, 1.0):
        return None
    product = only_user(shifted)
    if not is_call(product, aten.mul.Tensor):
        return None
    half = split_operands(product, shifted)
    if not is_call(half, aten.mul.Tensor) or not _is_scalar(half, aten.mul.Tensor, 0.5):
        return None
    gate = half.args[0]
    inner = anchor.args[0]
    if not isinstance(gate, fx.Node) or not isinstance(inner, fx.Node):
        return None
    name = GELU if anchor.target == aten.erf.default else GELU_TANH
    is_exact = (
        _is_scalar(inner, aten.mul.Tensor, math.sqrt(0.5), gate) if name == GELU else _is_cubic(inner, gate)
    )
    if not is_exact:
        detail = "its argument is not computed as PyTorch's own GELU computes it"
        return _with_tail(name, gate, product, obstacle=Miss(Reason.OTHER_SPELLING, detail))
    if dtype(gate) != torch.float32:
        return _with_tail(name, gate, product, obstacle=_rounds_inside(dtype(gate)))
    return _with_tail(name, gate, product)


def _is_cubic(node: fx.Node, gate: fx.Node) -> bool:
    """sqrt(2 / pi) * (g + 0.044715 * (g * g * g)), in this order."""
    if not _is_scalar(node, aten.mul.Tensor, math.sqrt(2 / math.pi)):
        return False
    total = node.args[0]
    if not is_call(total, aten.add.Tensor) or total.kwargs or total.args[0] is not gate:
        return False
    scaled = total.args[1]
    if not isinstance(scaled, fx.Node) or not _is_scalar(scaled, aten.mul.Tensor, 0.044715):
        return False
    cube = scaled.args[0]
    if not is_call(cube, aten.mul.Tensor) or cube.args[1] is not gate:
        return False
    square = cube.args[0]
    return is_call(square, aten.mul.Tensor) and square.args[0] is gate and square.args[1] is gate


def _is_scalar(node: fx.Node, target: object, value: float, base: fx.Node | None = None) -> bool:
    """Return whether a node combines a tensor (`base`, if given) with exactly this number."""
    if node.target != target or node.kwargs or len(node.args) != 2:
        return False
    return number(node.args[1]) == value and (base is None or node.args[0] is base)


def _with_tail(
    name: str,
    gate: fx.Node,
    last: fx.Node,
    sigmoid_dtype: torch.dtype | None = None,
    obstacle: Miss | None = None,
) -> Activation:
    """Take in the cast that rounds the activation."""
    act_dtype = None
    user = only_user(last)
    if user is not None and cast_source(user) is last and dtype(user) in FLOATS:
        last, act_dtype = user, dtype(user)
    return Activation(name, widened_from(gate), last, sigmoid_dtype, act_dtype, obstacle)


def _rounds_inside(kind: torch.dtype | None) -> Miss:
    return Miss(Reason.DTYPE, f"the activation is computed in {kind}, step by step")
