"""Calls the attention kernel that the target's policy names, where the model says only "attention".

Done to the rebuilt graph, before AOTAutograd would take `scaled_dot_product_attention` apart for the device
that is here. Only operators of torch and `getitem` are put in: torch's caches keep such graphs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node

from fuse_cache.kernels.fx_targets import DTYPE_NAMES
from fuse_cache.kernels.targets.attention import AttentionCall, NoBackendError, choose
from fuse_cache.proto.gpu_target import Architecture
from fuse_cache.server.worker.protocol import BuildFailed

_NAMES: Final = (
    "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
)  # fmt: skip
# cuDNN makes NaN of a row whose mask is -inf throughout; torch hands it the least half instead.
_LEAST_HALF: Final = -65504.0


def use_policy(gm: GraphModule, architecture: Architecture, allowed: Iterable[str]) -> dict[str, int]:
    """Replace each attention call of `gm`, in place, and return how many of them each backend got.

    Raises:
        BuildFailed: no backend that is allowed can compute one of them.
    """
    aten: Any = torch.ops.aten
    targets: tuple[Any, ...] = (
        torch.nn.functional.scaled_dot_product_attention,
        torch._C._nn.scaled_dot_product_attention,
        aten.scaled_dot_product_attention.default,
    )
    permitted = tuple(allowed)
    chosen: dict[str, int] = {}
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target not in targets:
            continue
        arguments = {**dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}
        if any(isinstance(arguments.get(name), Node) for name in _NAMES[4:]):
            continue  # A number that is known at run time only: torch decides then, as it would in eager.
        try:
            backend = choose(_call(arguments), architecture, permitted)
        except NoBackendError as error:
            raise BuildFailed("COMPILE_FAILED", str(error), stage="rebuild") from error
        chosen[backend] = chosen.get(backend, 0) + 1
        with gm.graph.inserting_before(node):
            replacement = _BUILDERS[backend](gm.graph, arguments)
        replacement.meta.update(node.meta)
        node.replace_all_uses_with(replacement)
        gm.graph.erase_node(node)
    if chosen:
        gm.recompile()
    return chosen


def _call(arguments: dict[str, Any]) -> AttentionCall:
    query, key, value = (_value(arguments[name]) for name in _NAMES[:3])
    tensors = (query, key, value)
    is_plain = all(
        tensor.dim() == 4 and tensor.stride(-1) == 1 and isinstance(tensor.shape[-1], int)
        for tensor in tensors
    ) and all(isinstance(tensor.shape[1], int) for tensor in tensors)
    mask = arguments.get("attn_mask")
    whole = query if is_plain else torch.empty(1, 1, 1, 1, device="meta")
    keys = key if is_plain else whole
    return AttentionCall(
        dtype=DTYPE_NAMES[query.dtype],
        heads=int(whole.shape[1]),
        kv_heads=int(keys.shape[1]),
        head=int(whole.shape[-1]),
        value_head=int(value.shape[-1]) if is_plain else 1,
        queries=_known(whole.shape[2]),
        keys=_known(keys.shape[2]),
        is_square=_same(whole.shape[2], keys.shape[2]),
        is_plain=is_plain and query.dtype == key.dtype == value.dtype and key.shape[1] == value.shape[1],
        is_static=all(isinstance(size, int) for tensor in tensors for size in tensor.shape),
        mask=None if mask is None else DTYPE_NAMES[_value(mask).dtype],
        causal=bool(arguments.get("is_causal", False)),
        dropout=float(arguments.get("dropout_p", 0.0)),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def _value(node: Node) -> torch.Tensor:
    found = node.meta["example_value"]
    assert isinstance(found, torch.Tensor)
    return found


def _known(size: int | torch.SymInt) -> int | None:
    return size if isinstance(size, int) else None


def _same(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Tell whether two sizes are one expression: a comparison of their values would leave a guard."""
    left, right = (size.node.expr if isinstance(size, torch.SymInt) else size for size in (a, b))
    return bool(left == right)


def _scale(arguments: dict[str, Any]) -> float:
    given = arguments.get("scale")
    return 1.0 / math.sqrt(int(_value(arguments["query"]).shape[-1])) if given is None else float(given)


def _cudnn(graph: torch.fx.Graph, arguments: dict[str, Any]) -> Node:
    query, key, value = (arguments[name] for name in _NAMES[:3])
    bias = _additive(graph, arguments, _LEAST_HALF)
    causal = bool(arguments.get("is_causal", False))
    return _first(
        graph,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        (query, key, value, bias, False, 0.0, causal, False),
        arguments,
    )


def _flash(graph: torch.fx.Graph, arguments: dict[str, Any]) -> Node:
    query, key, value = (arguments[name] for name in _NAMES[:3])
    causal = bool(arguments.get("is_causal", False))
    return _first(
        graph,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        (query, key, value, 0.0, causal, False),
        arguments,
    )


def _efficient(graph: torch.fx.Graph, arguments: dict[str, Any]) -> Node:
    query, key, value = (arguments[name] for name in _NAMES[:3])
    groups = int(_value(query).shape[1]) // int(_value(key).shape[1])
    if groups > 1:  # It has no grouped heads of its own in torch 2.11.
        key, value = (
            graph.call_function(torch.repeat_interleave, (tensor, groups), {"dim": 1})
            for tensor in (key, value)
        )
    bias = _additive(graph, arguments, -math.inf)
    if bias is not None:
        sizes = [_size(graph, query, dim) for dim in (0, 1, 2)] + [_size(graph, arguments["key"], 2)]
        bias = graph.call_function(torch.ops.aten.expand.default, (bias, sizes))
    causal = bool(arguments.get("is_causal", False))
    return _first(
        graph,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        (query, key, value, bias, False, 0.0, causal),
        arguments,
    )


def _math(graph: torch.fx.Graph, arguments: dict[str, Any]) -> Node:
    query, key, value = (arguments[name] for name in _NAMES[:3])
    bias = _additive(graph, arguments, -math.inf)
    causal, dropout = bool(arguments.get("is_causal", False)), float(arguments.get("dropout_p", 0.0))
    call = graph.call_function(
        torch.ops.aten._scaled_dot_product_attention_math.default,
        (query, key, value, bias, dropout, causal, None),
        {"scale": arguments.get("scale"), "enable_gqa": bool(arguments.get("enable_gqa", False))},
    )
    return graph.call_function(operator.getitem, (call, 0))


def _first(graph: torch.fx.Graph, target: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> Node:
    """Return the first of the call's results, which is the attention."""
    call = graph.call_function(target, args, {"scale": _scale(arguments)})
    return graph.call_function(operator.getitem, (call, 0))


def _additive(graph: torch.fx.Graph, arguments: dict[str, Any], excluded: float) -> Node | None:
    """Return the mask as what is added to scores: for a bool mask, `excluded` where it is False."""
    mask = arguments.get("attn_mask")
    if mask is None or _value(mask).dtype is not torch.bool:
        return mask
    out = graph.call_function(torch.logical_not, (mask,))
    zeros = graph.call_function(torch.zeros_like, (mask,), {"dtype": _value(arguments["query"]).dtype})
    return graph.call_function(torch.masked_fill, (zeros, out, excluded))


def _size(graph: torch.fx.Graph, tensor: Node, dim: int) -> int | Node:
    size = _value(tensor).shape[dim]
    return size if isinstance(size, int) else graph.call_method("size", (tensor, dim))


_BUILDERS: Final = {"cudnn": _cudnn, "flash": _flash, "efficient": _efficient, "math": _math}
