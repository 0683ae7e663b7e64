"""Which of PyTorch's attention kernels a GPU gets, decided without the GPU.

`F.scaled_dot_product_attention` asks the device that is there, and with none it takes the one that writes the
whole score matrix ("math"). The rules are those of `sdp_utils.cpp` (torch 2.11 to 2.13) narrowed where they
depend on sizes that a compile range leaves open; `tests/gpu/attention_choices.json` holds what an H200 chose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from fuse_cache.proto.gpu_target import Architecture

BACKENDS: Final = ("cudnn", "flash", "efficient", "math")
_HALF: Final = frozenset({"bfloat16", "float16"})
_FLASH_HEAD: Final = 256
_TENSOR_CORE_BYTES: Final = 16  # a row of a tensor core's operand: 8 halves, 4 floats
# cuDNN's largest head by architecture. sm_90: an H200 took 256 with cuDNN 9.19.
_CUDNN_HEADS: Final[Mapping[int, int]] = {9: 256, 10: 128}


class NoBackendError(ValueError):
    """None of the attention kernels that the host allows can compute the call. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One call: query [batch, heads, queries, head], key and value [batch, kv_heads, keys, head or value].

    `queries` and `keys` are None where the compile range leaves them open. `is_square` says that they are the
    same size whatever it is; `mask` is the mask's dtype, None without one; `is_plain` that the tensors have
    four dimensions of which the last is dense.
    """

    dtype: str
    heads: int
    kv_heads: int
    head: int
    value_head: int
    queries: int | None
    keys: int | None
    is_square: bool
    is_plain: bool = True
    is_static: bool = False  # every size is known
    mask: str | None = None
    causal: bool = False
    dropout: float = 0.0
    deterministic: bool = False


def choose(call: AttentionCall, architecture: Architecture, allowed: Iterable[str]) -> str:
    """Return the backend for `call`: the first in order that can compute it and that is allowed.

    Raises:
        NoBackendError: "math" is not allowed, and no other can compute it.
    """
    permitted = frozenset(allowed)
    reasons = {}
    for backend in _order(call, architecture):
        if backend not in permitted:
            continue
        reason = _REFUSALS[backend](call, architecture)
        if reason is None:
            return backend
        reasons[backend] = reason
    why = "; ".join(f"{backend}: {reason}" for backend, reason in reasons.items())
    raise NoBackendError(
        f"no allowed attention backend can compute scaled_dot_product_attention for {architecture.target}"
        f" ({why or 'none is allowed'}); allow math as well (torch.nn.attention.sdpa_kernel)"
    )


def _order(call: AttentionCall, architecture: Architecture) -> tuple[str, ...]:
    # Torch itself prefers cuDNN on these two generations alone. It makes a plan for every new shape (23 to
    # 37 ms each on a host), so where sizes vary it comes after the others.
    if architecture.major in _CUDNN_HEADS and call.is_static:
        return BACKENDS
    return ("flash", "efficient", "cudnn", "math")


def _not_fused(call: AttentionCall) -> str | None:
    """Return why none but "math" can take the call."""
    if not call.is_plain:
        return "query, key and value need four dimensions, the last of them dense"
    if call.dropout:
        return "dropout"
    if call.queries == 0 or call.keys == 0:
        return "an empty sequence"
    if call.mask not in (None, "bool", call.dtype):
        return f"a mask of {call.mask} for a query of {call.dtype}"
    if call.kv_heads < 1 or call.heads % call.kv_heads:
        return f"{call.heads} heads are no multiple of {call.kv_heads}"
    return None


def _cudnn(call: AttentionCall, architecture: Architecture) -> str | None:
    largest = _CUDNN_HEADS.get(architecture.major, 128)
    if call.dtype not in _HALF:
        return f"it has no {call.dtype}"
    if call.head % 8 or call.value_head % 8 or max(call.head, call.value_head) > largest:
        return f"head sizes {call.head} and {call.value_head} are no multiples of 8 up to {largest}"
    if call.keys is None or call.keys == 1:
        return "there may be a single key"
    if call.deterministic:
        return "it is not deterministic"
    return _not_fused(call)


def _flash(call: AttentionCall, architecture: Architecture) -> str | None:
    if call.dtype not in _HALF:
        return f"it has no {call.dtype}"
    if call.mask is not None:
        return "it takes no mask"
    if call.head != call.value_head or call.head % 8 or call.head > _FLASH_HEAD:
        return f"head sizes {call.head} and {call.value_head} are not one multiple of 8 up to {_FLASH_HEAD}"
    if call.causal and not call.is_square:
        return "causal attention of queries and keys of different number"
    return _not_fused(call)


def _efficient(call: AttentionCall, architecture: Architecture) -> str | None:
    if call.dtype not in _HALF and call.dtype != "float32":
        return f"it has no {call.dtype}"
    multiple = _TENSOR_CORE_BYTES // (2 if call.dtype in _HALF else 4)
    if call.head % multiple or call.value_head % multiple:
        return f"head sizes {call.head} and {call.value_head} are no multiples of {multiple}"
    return _not_fused(call)


def _math(call: AttentionCall, architecture: Architecture) -> str | None:
    return None


_REFUSALS: Final[Mapping[str, Callable[[AttentionCall, Architecture], str | None]]] = {
    "cudnn": _cudnn,
    "flash": _flash,
    "efficient": _efficient,
    "math": _math,
}
