"""The passes on Llama graphs of 8 to 80 layers whose linears quantise: linear in the layers, and how long.

The graph is that of one block on fake tensors, repeated: what a pass sees is layers, whoever traced them.
"""

from __future__ import annotations

import functools
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
ROUNDS = 5
HIDDEN, WIDE, HEADS = 256, 512, 4
MAX = 448.0
BAR_S = 8.0  # Raising and fusing 80 layers on 2 cores.
# A late layer may cost so much more than an early one.
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


def _block(x: Tensor, square: Tensor, wide: Tensor, narrow: Tensor, weight: Tensor) -> tuple[Tensor]:
    batch, length, _ = x.shape
    normed = _norm(x, weight)
    q, k, v = (_linear(normed, square).view(batch, length, HEADS, -1).transpose(1, 2) for _ in range(3))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + _linear(attended.transpose(1, 2).reshape(batch, length, HIDDEN), square)
    normed = _norm(x, weight)
    return (x + _linear(F.silu(_linear(normed, wide)) * _linear(normed, wide), narrow),)


def _head(x: Tensor, weight: Tensor) -> tuple[Tensor]:
    return (_norm(x, weight),)


@functools.cache
def _traced() -> tuple[fx.Graph, fx.Graph]:
    """Return the joint graphs of a block and of the last norm, with a symbolic batch."""
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
        x, *weights = map(fake, sizes)
        block = make_fx(_block, select_decomp_table())(x, *weights)
        return block.graph, make_fx(_head, select_decomp_table())(x, weights[-1]).graph


def llama(layers: int) -> fx.GraphModule:
    """Return the joint graph of a model of so many blocks, which share their weights."""
    block, head = _traced()
    graph = fx.Graph()
    inputs = [graph.node_copy(node) for node in block.find_nodes(op="placeholder")]
    x, *weights = inputs
    for _ in range(layers):
        x = _append(graph, block, [x, *weights])
    graph.output((_append(graph, head, [x, weights[-1]]),))
    return fx.GraphModule({}, graph)


def _append(graph: fx.Graph, part: fx.Graph, inputs: list[fx.Node]) -> fx.Node:
    """Copy the calls of `part`, and return the copy of its one result."""
    copies = dict(zip(part.find_nodes(op="placeholder"), inputs, strict=True))
    for node in part.nodes:
        if node.op == "output":
            result: fx.Node = copies[node.all_input_nodes[0]]
            return result
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    raise AssertionError("a graph has an output")


def run_passes(gm: fx.GraphModule) -> tuple[dict[Stage, float], dict[str, int]]:
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
    """Time runs of all passes for each number of layers, after a small one that loads everything."""
    run_passes(llama(1))
    rows = []
    totals = {}
    for layers in LAYERS:
        runs = []
        for _ in range(ROUNDS):
            gm = llama(layers)
            nodes = len(gm.graph.nodes)
            seconds, matches = run_passes(gm)
            assert matches["norm_quant"] == 2 * layers
            assert matches["act_quant"] == layers
            runs.append(seconds)
        # The least of each: other processes on the same cores only add.
        seconds = {stage: min(run[stage] for run in runs) for stage in Stage}
        fused = seconds[Stage.JOINT] + seconds[Stage.FUSE]
        totals[layers] = sum(seconds.values())
        what = f"CPU time, raising + fusing, {layers} layers, {nodes} nodes"
        rows.append(Row(what=what, value=fused, unit="s", bar=BAR_S if layers == max(LAYERS) else None))
        rows.append(Row(what=f"lowering, {layers} layers", value=seconds[Stage.LOWER], unit="s"))
    early, late = (_per_layer(totals, *between) for between in (LAYERS[::2], LAYERS[2:]))
    what = f"cost of a layer more from {LAYERS[2]} to {LAYERS[3]} over that from {LAYERS[0]} to {LAYERS[2]}"
    rows.append(Row(what=what, value=late / early, unit="x", bar=MOST_GROWTH))
    return rows


def _per_layer(totals: dict[int, float], few: int, many: int) -> float:
    """Return what a layer more costs: what all graphs pay once is in neither."""
    return (totals[many] - totals[few]) / (many - few)
