"""The global state of this process that changes what the compiler makes of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.backends.cuda import (
    cudnn_sdp_enabled,
    flash_sdp_enabled,
    math_sdp_enabled,
    mem_efficient_sdp_enabled,
)

from fuse_cache.client.unkeyable import UnkeyableGraph
from fuse_cache.kernels.fx_targets import DTYPE_NAMES
from fuse_cache.proto.request import Ambient

_AUTOCAST_DEVICES: Final = ("cpu", "cuda")
_SDPA: Final[tuple[tuple[str, Callable[[], bool]], ...]] = (
    ("cudnn", cudnn_sdp_enabled),
    ("efficient", mem_efficient_sdp_enabled),
    ("flash", flash_sdp_enabled),
    ("math", math_sdp_enabled),
)


def capture_ambient() -> Ambient:
    """Read the state as it is in this thread now. Call it where the graph will run: inside the backend.

    Raises:
        UnkeyableGraph: the state has no form in a request.
    """
    matmul: Any = torch.backends.cuda.matmul
    try:
        precision, tf32 = torch.get_float32_matmul_precision(), bool(matmul.allow_tf32)
    except RuntimeError as error:
        raise UnkeyableGraph(
            "torch cannot tell the matmul precision, because `fp32_precision` was set: use "
            "torch.set_float32_matmul_precision instead"
        ) from error
    deterministic: Any = torch.utils.deterministic
    return Ambient(
        grad_mode=torch.is_grad_enabled(),
        inference_mode=torch.is_inference_mode_enabled(),
        autocast=tuple(
            (device, DTYPE_NAMES[torch.get_autocast_dtype(device)])
            for device in _AUTOCAST_DEVICES
            if torch.is_autocast_enabled(device)
        ),
        default_dtype=DTYPE_NAMES[torch.get_default_dtype()],
        deterministic=torch.are_deterministic_algorithms_enabled(),
        deterministic_fill=deterministic.fill_uninitialized_memory,
        float32_matmul_precision=precision,
        allow_tf32=tf32,
        allow_bf16_reduced_precision=bool(matmul.allow_bf16_reduced_precision_reduction),
        allow_fp16_reduced_precision=bool(matmul.allow_fp16_reduced_precision_reduction),
        sdpa_backends=tuple(name for name, enabled in _SDPA if enabled()),
    )
