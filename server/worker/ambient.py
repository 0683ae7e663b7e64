"""Puts a worker into the state that the host was in when it captured the graph, as far as that state
changes what is compiled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fuse_cache.proto.request import Ambient
from fuse_cache.server.worker.protocol import BuildFailed

_SDPA = {"cudnn": "cudnn_sdp", "efficient": "mem_efficient_sdp", "flash": "flash_sdp", "math": "math_sdp"}


@contextlib.contextmanager
def ambient_state(ambient: Ambient) -> Iterator[None]:
    """Apply `ambient` while the context lasts.

    Raises:
        BuildFailed: it names something that this torch does not have.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(ambient.grad_mode and not ambient.inference_mode))
        _default_dtype(stack, _dtype(ambient.default_dtype))
        _deterministic(stack, ambient)
        _switch(stack, torch.backends.cuda.matmul, "allow_tf32", ambient.allow_tf32)
        _switch(
            stack,
            torch.backends.cuda.matmul,
            "allow_bf16_reduced_precision_reduction",
            ambient.allow_bf16_reduced_precision,
        )
        _switch(
            stack,
            torch.backends.cuda.matmul,
            "allow_fp16_reduced_precision_reduction",
            ambient.allow_fp16_reduced_precision,
        )
        before = torch.get_float32_matmul_precision()
        stack.callback(torch.set_float32_matmul_precision, before)
        torch.set_float32_matmul_precision(ambient.float32_matmul_precision)
        _sdpa(stack, ambient.sdpa_backends)
        for device, dtype in ambient.autocast:
            _autocast(stack, device, _dtype(dtype))
        yield


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise BuildFailed(
            "REQUEST_MALFORMED", f"{name!r} is not a dtype of torch {torch.__version__}", stage="rebuild"
        )
    return dtype


def _default_dtype(stack: contextlib.ExitStack, dtype: torch.dtype) -> None:
    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(dtype)


def _deterministic(stack: contextlib.ExitStack, ambient: Ambient) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    stack.callback(torch.use_deterministic_algorithms, before, warn_only=warn_only)
    torch.use_deterministic_algorithms(ambient.deterministic)
    _switch(stack, torch.utils.deterministic, "fill_uninitialized_memory", ambient.deterministic_fill)


def _sdpa(stack: contextlib.ExitStack, enabled: tuple[str, ...]) -> None:
    for name, suffix in _SDPA.items():
        is_enabled = getattr(torch.backends.cuda, f"{suffix}_enabled")
        enable = getattr(torch.backends.cuda, f"enable_{suffix}")
        stack.callback(enable, is_enabled())
        enable(name in enabled)


def _autocast(stack: contextlib.ExitStack, device: str, dtype: torch.dtype) -> None:
    """Switch autocast on as a host has it.

    By the switches and not by `torch.autocast`, which asks the device what it can: here there may be none,
    and it would stay off with a warning, or raise.
    """
    stack.callback(torch.clear_autocast_cache)
    stack.callback(torch.set_autocast_dtype, device, torch.get_autocast_dtype(device))
    stack.callback(torch.set_autocast_enabled, device, torch.is_autocast_enabled(device))
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    torch.autocast_increment_nesting()
    stack.callback(torch.autocast_decrement_nesting)


def _switch(stack: contextlib.ExitStack, owner: Any, name: str, value: bool) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
