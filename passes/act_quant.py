"""Fuses a gated activation with the quantisation of its result."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fuse_cache.kernels.act_and_mul.op import ACT_AND_MUL
from fuse_cache.kernels.act_and_mul.reference import SILU
from fuse_cache.kernels.fused_quant.op import FUSED
from fuse_cache.kernels.quant_fp8_static.op import QUANT_FP8_STATIC
from fuse_cache.kernels.scaling import DIVIDE
from fuse_cache.passes.base import Outcome, Pass, Pattern, Setting
from fuse_cache.passes.fuse_quant import QuantFusion

_NAME = "act_quant"


def _run(graph: fx.Graph, setting: Setting) -> Outcome:
    return QuantFusion(graph, _NAME, (ACT_AND_MUL,), "activation", setting).run(with_orphans=False)


def _search(gate: Tensor, up: Tensor, scale: Tensor) -> Tensor:
    return ((F.silu(gate) * up).float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def _replacement(gate: Tensor, up: Tensor, scale: Tensor) -> Tensor:
    _, fused = FUSED[ACT_AND_MUL, QUANT_FP8_STATIC, False]
    activation = (gate, up, SILU, None, torch.bfloat16, None)
    quantisation = (None, scale, DIVIDE, torch.float32, -448.0, 448.0, torch.float8_e4m3fn)
    codes = fused.reference(*fused.arguments(activation, quantisation))
    assert isinstance(codes, Tensor)
    return codes


def _example_inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(5, 64, generator=generator).to(torch.bfloat16) for _ in range(2))
    return gate, up, torch.tensor(0.02)


PASS = Pass(
    name=_NAME,
    run=_run,
    patterns=(Pattern("silu_and_mul + static fp8", _search, _replacement, _example_inputs),),
)
