"""The passes on Llama graphs of 8 to 80 layers whose linears quantise: linear in the layers, and how long.

The graph is that of one block on fake tensors, repeated: what a pass sees is layers, whoever traced them.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fuse_cache.passes.base import Setting
from fuse_cache.passes.manager import load_pass
from fuse_cache.passes.order import PLACES, Stage
from fuse_cache.passes.verify import promise_of, verify
from tests.bench.row import Row

LAYERS = (8, 16, 32, 80)
HIDDEN, WIDE, HEADS = 256, 512, 4
MAX = 448.0
# One layer more may cost so much more than the first ones did.
MOST_GROWTH = 1.5


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """A linear layer that quantises each row of what it reads."""
    rows = x.reshape(-1, x.shape[-1])
    scale = (rows.abs().amax(-1, keepdim=True).float() / MAX).clamp(min=1.0 / (MAX * 512))
    codes = (rows.float() / scale).clamp(-MAX, MAX).to(torch.float8_e4m3fn)
    product = (codes.to(x.dtype) @ weight.t()) * scale
    return product.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def _model(layers: int, x: Tensor, square: Tensor, wide: Tensor, narrow: Tensor, weight: Tensor) -> Tensor:
    batch, length, _ = x.shape
    for _ in range(layers):
        normed = _norm(x, weight)
        q, k, v = (_linear(normed, square).view(batch, length, HEADS, -1).transpose(1, 2) for _ in range(3))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + _linear(attended.transpose(1, 2).reshape(batch, length, HIDDEN), square)
        normed = _norm(x, weight)
        x = x + _linear(F.silu(_linear(normed, wide)) * _linear(normed, wide), narrow)
    return _norm(x, weight)


def _graph(layers: int) -> fx.GraphModule:
    """Return the joint graph with a symbolic batch."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    sizes = ((3, 8, HIDDEN), (HIDDEN, HIDDEN), (WIDE, HIDDEN), (HIDDEN, WIDE), (HIDDEN,))

    def fake(shape: tuple[int, ...]) -> Tensor:
        kinds = [
            DimDynamic.DYNAMIC if len(shape) == 3 and dim == 0 else DimDynamic.STATIC
            for dim in range(len(shape))
        ]
        context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(dynamic_sizes=kinds)
        return mode.from_tensor(torch.empty(shape, dtype=torch.bfloat16), symbolic_context=context)

    with torch.no_grad(), enable_python_dispatcher():
        return make_fx(lambda *args: (_model(layers, *args),), select_decomp_table())(*map(fake, sizes))


def _run(gm: fx.GraphModule) -> tuple[dict[Stage, float], dict[str, int]]:
    """Run every built pass as the manager does; return CPU seconds by hook, and matches."""
    setting = Setting("cpu-avx2")
    seconds = dict.fromkeys(Stage, 0.0)
    matches = {}
    promise = promise_of(gm.graph)
    for name, place in PLACES.items():
        began = time.process_time()
        outcome = load_pass(name).run(gm.graph, setting)
        verify(gm.graph, promise, name)
        seconds[place.stage] += time.process_time() - began
        matches[name] = outcome.matches
    return seconds, matches


def measure() -> list[Row]:
    """Time one run of all passes for each number of layers, after a small one that loads everything."""
    _run(_graph(1))
    rows = []
    per_layer = {}
    for layers in LAYERS:
        gm = _graph(layers)
        nodes = len(gm.graph.nodes)
        seconds, matches = _run(gm)
        fused = seconds[Stage.JOINT] + seconds[Stage.FUSE]
        assert matches["norm_quant"] == 2 * layers
        assert matches["act_quant"] == layers
        per_layer[layers] = sum(seconds.values()) / layers
        what = f"CPU time, raising + fusing, {layers} layers, {nodes} nodes"
        rows.append(Row(what=what, value=fused, unit="s", bar=8.0 if layers == max(LAYERS) else None))
        rows.append(Row(what=f"lowering, {layers} layers", value=seconds[Stage.LOWER], unit="s"))
    growth = per_layer[max(LAYERS)] / per_layer[min(LAYERS)]
    what = f"time a layer of {max(LAYERS)} over that of {min(LAYERS)}"
    rows.append(Row(what=what, value=growth, unit="x", bar=MOST_GROWTH))
    return rows
