"""Calls the attention kernel that the target's policy names, where the model says only "attention".

Left to itself torch asks the device that is here for one: with none it takes the kernel that writes all
scores, and with one its questions about sizes leave guards. So the policy answers twice: while the graph is
rebuilt, for the value of each call, and in the graph, before AOTAutograd runs it. Only operators of torch and
`getitem` are put in: torch's caches keep such graphs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import GraphModule, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from fuse_cache.kernels.fx_targets import DTYPE_NAMES
from fuse_cache.kernels.targets.attention import AttentionCall, NoBackendError, choose
from fuse_cache.proto.gpu_target import Architecture
from fuse_cache.server.worker.protocol import BuildFailed

_ATEN: Final[Any] = torch.ops.aten
CALLS: Final[frozenset[Any]] = frozenset(
    {
        torch.nn.functional.scaled_dot_product_attention,
        torch._C._nn.scaled_dot_product_attention,
        _ATEN.scaled_dot_product_attention.default,
    }
)
_NAMES: Final = (
    "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
)  # fmt: skip
# cuDNN makes NaN of a row whose mask is -inf throughout; torch hands it the least half instead.
_LEAST_HALF: Final = -65504.0


class Policy:
    """The choice for one build: for `architecture`, among the backends that the host allows."""

    def __init__(self, architecture: Architecture, allowed: Iterable[str]) -> None:
        self._architecture = architecture
        self._allowed = tuple(allowed)

    def value(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a call gives for these fake tensors.

        Raises:
            BuildFailed: no backend that is allowed can compute it.
        """
        arguments = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
        return _attend(self._backend(arguments), arguments, arguments)

    def apply(self, gm: GraphModule) -> dict[str, int]:
        """Replace each call of `gm`, in place, and return how many of them each backend got.

        Raises:
            BuildFailed: no backend that is allowed can compute one of them.
        """
        tracer = GraphAppendingTracer(gm.graph)
        chosen: dict[str, int] = {}
        for node in [node for node in gm.graph.nodes if node.op == "call_function" and node.target in CALLS]:
            given = {**dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}
            values = {name: _value(argument) for name, argument in given.items()}
            backend = self._backend(values)
            chosen[backend] = chosen.get(backend, 0) + 1
            proxies = {
                name: Proxy(argument, tracer) if isinstance(argument, Node) else argument
                for name, argument in given.items()
            }
            with gm.graph.inserting_before(node):
                replacement: Node = _attend(backend, proxies, values).node
            replacement.meta.update(node.meta)
            node.replace_all_uses_with(replacement)
            gm.graph.erase_node(node)
        if chosen:
            gm.recompile()
        return chosen

    def _backend(self, values: dict[str, Any]) -> str:
        try:
            return choose(_call(values), self._architecture, self._allowed)
        except NoBackendError as error:
            raise BuildFailed("COMPILE_FAILED", str(error), stage="rebuild") from error


def _value(argument: Any) -> Any:
    return argument.meta["example_value"] if isinstance(argument, Node) else argument


def _call(values: dict[str, Any]) -> AttentionCall:
    query, key, value = (values[name] for name in _NAMES[:3])
    tensors: tuple[Tensor, ...] = (query, key, value)
    mask, dropout, causal = values.get("attn_mask"), values.get("dropout_p", 0.0), values.get("is_causal")
    is_plain = (
        all(tensor.dim() == 4 and tensor.stride(-1) == 1 for tensor in tensors)
        and all(isinstance(tensor.shape[dim], int) for tensor in tensors for dim in (1, -1))
        and query.dtype == key.dtype == value.dtype
        and key.shape[1] == value.shape[1]
        # Known at run time only: torch's own code for any case then.
        and not any(isinstance(part, torch.SymFloat | torch.SymBool) for part in (dropout, causal))
    )
    heads, kv_heads, head, value_head = (
        (query.shape[1], key.shape[1], query.shape[-1], value.shape[-1]) if is_plain else (1, 1, 1, 1)
    )
    return AttentionCall(
        dtype=DTYPE_NAMES[query.dtype],
        heads=int(heads),
        kv_heads=int(kv_heads),
        head=int(head),
        value_head=int(value_head),
        queries=_known(query.shape[-2]),
        keys=_known(key.shape[-2]),
        is_square=_same(query.shape[-2], key.shape[-2]),
        is_plain=is_plain,
        is_static=all(isinstance(size, int) for tensor in tensors for size in tensor.shape),
        mask=None if mask is None else DTYPE_NAMES[mask.dtype],
        causal=bool(causal) if is_plain else False,
        dropout=float(dropout) if is_plain else 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def _known(size: int | torch.SymInt) -> int | None:
    return size if isinstance(size, int) else None


def _same(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Tell whether two sizes are one expression: a comparison of their values would leave a guard."""
    left, right = (size.node.expr if isinstance(size, torch.SymInt) else size for size in (a, b))
    return bool(left == right)


def _attend(backend: str, arguments: dict[str, Any], values: dict[str, Any]) -> Any:
    """Compute attention by `backend`: of fake tensors, or of proxies, which write it into a graph.

    `values` are the fake tensors in both cases: they say which dtypes and sizes there are.
    """
    query, key, value = (arguments[name] for name in _NAMES[:3])
    causal, dropout = arguments.get("is_causal", False), arguments.get("dropout_p", 0.0)
    bias = _bias(arguments, values, _LEAST_HALF if backend == "cudnn" else -math.inf)
    scale = arguments.get("scale")
    if backend == "math":
        return _ATEN._scaled_dot_product_attention_math.default(
            query, key, value, bias, dropout, causal, None,
            scale=scale, enable_gqa=bool(arguments.get("enable_gqa", False)),
        )[0]  # fmt: skip
    if scale is None:
        scale = 1.0 / math.sqrt(int(values["query"].shape[-1]))
    if backend == "flash":
        attend = _ATEN._scaled_dot_product_flash_attention.default
        return attend(query, key, value, 0.0, bool(causal), False, scale=scale)[0]
    if backend == "cudnn":
        attend = _ATEN._scaled_dot_product_cudnn_attention.default
        return attend(query, key, value, bias, False, 0.0, bool(causal), False, scale=scale)[0]
    groups = int(values["query"].shape[1]) // int(values["key"].shape[1])
    if groups > 1:  # It has no grouped heads of its own in torch 2.11.
        key, value = (torch.repeat_interleave(tensor, groups, dim=1) for tensor in (key, value))
    if bias is not None:
        sizes = [_size(query, values["query"], dim) for dim in (0, 1, 2)]
        bias = _ATEN.expand.default(bias, [*sizes, _size(arguments["key"], values["key"], 2)])
    attend = _ATEN._scaled_dot_product_efficient_attention.default
    return attend(query, key, value, bias, False, 0.0, bool(causal), scale=scale)[0]


def _bias(arguments: dict[str, Any], values: dict[str, Any], excluded: float) -> Any:
    """Return the mask as what is added to scores: for a bool mask, `excluded` where it is False."""
    mask = arguments.get("attn_mask")
    if mask is None or values["attn_mask"].dtype is not torch.bool:
        return mask
    zeros = torch.zeros_like(mask, dtype=values["query"].dtype)
    return torch.masked_fill(zeros, torch.logical_not(mask), excluded)


def _size(tensor: Any, value: Tensor, dim: int) -> Any:
    size = value.shape[dim]
    return size if isinstance(size, int) else tensor.size(dim)
