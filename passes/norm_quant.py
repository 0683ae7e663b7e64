"""Fuses RMSNorm, with or without an addition before it, with the quantisation of its result."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fuse_cache.kernels.fused_add_rms_norm.op import FUSED_ADD_RMS_NORM
from fuse_cache.kernels.fused_quant.op import FUSED
from fuse_cache.kernels.quant_fp8_static.op import QUANT_FP8_STATIC
from fuse_cache.kernels.rms_norm.op import RMS_NORM
from fuse_cache.kernels.scaling import DIVIDE
from fuse_cache.passes.base import Outcome, Pass, Pattern, Setting
from fuse_cache.passes.fuse_quant import QuantFusion

_NAME = "norm_quant"


def _run(graph: fx.Graph, setting: Setting) -> Outcome:
    # Additions first: their operators contain the plain ones.
    return QuantFusion(graph, _NAME, (FUSED_ADD_RMS_NORM, RMS_NORM), "norm", setting).run(with_orphans=True)


def _search(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    norm = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(torch.bfloat16)
    return (norm / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def _replacement(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    _, fused = FUSED[RMS_NORM, QUANT_FP8_STATIC, False]
    norm = (x, weight, 1e-6, 0.0, None, torch.bfloat16, None)
    quantisation = (None, scale, DIVIDE, torch.bfloat16, -448.0, 448.0, torch.float8_e4m3fn)
    codes = fused.reference(*fused.arguments(norm, quantisation))
    assert isinstance(codes, Tensor)
    return codes


def _example_inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 64, generator=generator).to(torch.bfloat16)
    return x, torch.randn(64, generator=generator).to(torch.bfloat16), torch.tensor(0.02)


PASS = Pass(
    name=_NAME,
    run=_run,
    patterns=(Pattern("rms_norm + static fp8", _search, _replacement, _example_inputs),),
)
