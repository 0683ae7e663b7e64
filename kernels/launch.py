"""Runs an operator by its Triton kernel: on CUDA tensors, under the interpreter, and traced into graphs.

The functions here are traceable: a launch is a node that Inductor inlines, so that an artifact carries the
kernel and its host needs none of our operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

import torch
import triton
from torch import Tensor
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._ops import OpOverload
from torch.library import wrap_triton

from fuse_cache.kernels.act_and_mul.kernel import act_and_mul_kernel
from fuse_cache.kernels.act_and_mul.op import ACT_AND_MUL
from fuse_cache.kernels.fused_add_rms_norm.op import FUSED_ADD_RMS_NORM
from fuse_cache.kernels.fused_quant.op import FUSED, PRODUCERS, QUANTISERS
from fuse_cache.kernels.library import Family
from fuse_cache.kernels.obstacles import obstacle
from fuse_cache.kernels.plan import PLANS, Plan, dtype_name, no_quantisation
from fuse_cache.kernels.rms_norm.kernel import rms_norm_kernel
from fuse_cache.kernels.rms_norm.op import RMS_NORM

Planner = Callable[[Tensor, tuple[Any, ...]], Plan]
Implementation = Callable[..., Tensor | tuple[Tensor, ...]]

# A row's sum is shaped by its block: one width for all keys, wide enough for four groups of 128.
MIN_BLOCK: Final = 512
MAX_TILE: Final = 2048  # Columns of a program that needs no whole row: 16 values a thread.
MAX_ROW_BLOCK: Final = 8192  # Columns of a program that goes over a whole row.


# Whether launches become nodes of the graph that is being traced.
_INTO_GRAPH: Final[ContextVar[bool]] = ContextVar("into_graph", default=False)


def _launch(
    kernel: Any, grid: tuple[Any, ...], arguments: tuple[Any, ...], written: tuple[str, ...], **options: Any
) -> dict[str, Tensor]:
    """Launch a kernel; return what it has written, by the names of its parameters in `written`."""
    named = dict(zip(kernel.arg_names, arguments, strict=False))
    if _INTO_GRAPH.get():
        return _node(kernel, grid, named, written, options)
    # No tokens: no launch is legal, and there is nothing to write.
    if not isinstance(grid[0], int) or grid[0] != 0:
        traceable = wrap_triton(kernel) if isinstance(kernel, triton.JITFunction) else kernel
        traceable[grid](*arguments, **options)
    return {name: named[name] for name in written}


def _node(
    kernel: Any,
    grid: tuple[Any, ...],
    named: dict[str, Any],
    written: tuple[str, ...],
    options: dict[str, Any],
) -> dict[str, Tensor]:
    """Put the launch into the graph, as a function that returns what it writes.

    What is written is said here: `wrap_triton` finds it out by compiling each launch for the GPU that is
    here, and takes everything for written where there is none.
    """
    num_warps = options.pop("num_warps")
    returned = triton_kernel_wrapper_functional(
        kernel_idx=kernel_side_table.add_kernel(_with_warps(kernel, num_warps)),
        constant_args_idx=kernel_side_table.add_constant_args({}),
        grid=[(*grid, 1, 1)[:3]],
        tma_descriptor_metadata={},
        kwargs={**named, **options},
        tensors_to_clone=list(written),
    )
    return dict(returned)


@functools.cache
def _with_warps(kernel: Any, num_warps: int) -> Any:
    """Return the kernel with its only configuration: one object, so that equal launches are one kernel."""
    return triton.autotune(configs=[triton.Config({}, num_warps=num_warps)], key=[])(kernel)


def _rows(x: Tensor) -> Tensor:
    """Return [..., H] as [T, H], without a copy for what `obstacles` lets pass. Adds no guard."""
    return x if x.dim() == 2 else x[None] if x.dim() == 1 else x.flatten(0, -2)


def run_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, attributes: tuple[Any, ...],
    planner: Planner | None, keep: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Run the norm kernel; return the quantiser's results, the norm if kept, the sum if one is made."""
    eps, weight_bias, weight_dtype, norm_dtype, out_dtype, *adding = attributes
    sum_dtype, norm_of_rounded = adding if adding else (None, False)
    width, shape = x.shape[-1], tuple(x.shape)
    product = norm_dtype or torch.float32
    if weight is not None:
        weight_dtype = weight_dtype or weight.dtype
        product = torch.promote_types(product, weight_dtype)
    plan = no_quantisation(x) if planner is None else planner(x, shape)
    y = x.new_empty(shape, dtype=out_dtype or product) if keep else x
    total = x if residual is None else x.new_empty(shape, dtype=sum_dtype)
    flat = _rows(x)
    added = flat if residual is None else _rows(residual)
    block = max(MIN_BLOCK, triton.next_power_of_2(width))
    tokens = flat.shape[0]
    sums = () if residual is None else ("total",)
    done = _launch(
        rms_norm_kernel,
        (tokens,),
        (
            *(flat, added, x if weight is None else weight, y, total, plan.factor, plan.codes, plan.scales),
            *(tokens, flat.stride(0), added.stride(0), plan.scales_stride),
        ),
        (*plan.written, *(("y",) if keep else ()), *sums),
        ADD=residual is not None,
        SUM_DTYPE=dtype_name(sum_dtype),
        NORM_OF_ROUNDED=norm_of_rounded,
        WEIGHTED=weight is not None,
        EPS=float(eps),
        WEIGHT_BIAS=float(weight_bias),
        WEIGHT_DTYPE=dtype_name(weight_dtype),
        NORM_DTYPE=dtype_name(norm_dtype),
        PRODUCT_DTYPE=dtype_name(product),
        OUT_DTYPE=dtype_name(out_dtype),
        KEEP=keep,
        HALVINGS=block.bit_length() - 2,
        H=width,
        BLOCK=block,
        **plan.constants,
        num_warps=min(16, block // MIN_BLOCK),
    )
    return (*_results(plan, done), *([done["y"]] if keep else []), *(done[name] for name in sums))


def _results(plan: Plan, done: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return plan.results(done.get("codes", plan.codes), done.get("scales", plan.scales))


def run_act(
    gate: Tensor, up: Tensor | None, attributes: tuple[Any, ...] | None, planner: Planner | None, keep: bool
) -> tuple[Tensor, ...]:
    """Run the activation kernel, without `attributes` as a quantisation alone; return as `run_norm` does."""
    packed = up is None and attributes is not None
    width = gate.shape[-1] // 2 if packed else gate.shape[-1]
    shape = (*gate.shape[:-1], width)
    activation, sigmoid_dtype, act_dtype, out_dtype = attributes or ("none", None, None, gate.dtype)
    product = torch.promote_types(act_dtype or torch.float32, (gate if up is None else up).dtype)
    plan = no_quantisation(gate) if planner is None else planner(gate, shape)
    y = gate.new_empty(shape, dtype=out_dtype or product) if keep else gate
    flat = _rows(gate)
    other = flat if up is None else _rows(up)
    whole_row = plan.constants["KIND"] == "token"
    block = max(MIN_BLOCK, min(triton.next_power_of_2(width), MAX_ROW_BLOCK if whole_row else MAX_TILE))
    tokens = flat.shape[0]
    done = _launch(
        act_and_mul_kernel,
        (tokens, 1 if whole_row else triton.cdiv(width, block)),
        (
            *(flat, other, y, plan.factor, plan.codes, plan.scales),
            *(tokens, flat.stride(0), other.stride(0), plan.scales_stride),
        ),
        (*plan.written, *(("y",) if keep else ())),
        PACKED_HALVES=packed,
        ACTIVATION=activation,
        SIGMOID_DTYPE=dtype_name(sigmoid_dtype),
        ACT_DTYPE=dtype_name(act_dtype),
        PRODUCT_DTYPE=dtype_name(product),
        OUT_DTYPE=dtype_name(out_dtype),
        KEEP=keep,
        H=width,
        BLOCK=block,
        **plan.constants,
        num_warps=min(16, max(1, block // MIN_BLOCK)),
    )
    return (*_results(plan, done), *([done["y"]] if keep else []))


def _produce(
    producer: OpOverload, arguments: tuple[Any, ...], planner: Planner | None, keep: bool
) -> tuple[Tensor, ...]:
    if producer == ACT_AND_MUL:
        gate, up, *attributes = arguments
        return run_act(gate, up, tuple(attributes), planner, keep)
    if producer == RMS_NORM:
        x, weight, *attributes = arguments
        return run_norm(x, None, weight, tuple(attributes), planner, keep)
    assert producer == FUSED_ADD_RMS_NORM
    x, residual, weight, *attributes = arguments
    return run_norm(x, residual, weight, tuple(attributes), planner, keep)


def implementations(target: str) -> dict[OpOverload, Implementation]:
    """Return how each operator runs by its kernel on a target. Arguments must have no obstacle there."""
    found: dict[OpOverload, Implementation] = {}
    for producer in PRODUCERS:
        found[producer] = _unfused_producer(producer)
    for quantiser in QUANTISERS:
        found[quantiser] = _unfused_quantiser(quantiser, target)
    for producer, quantiser, keep in FUSED:
        found[FUSED[producer, quantiser, keep][0]] = _fused(producer, quantiser, keep, target)
    return found


def _unfused_producer(producer: OpOverload) -> Implementation:
    return lambda *arguments: _one_or_all(_produce(producer, arguments, None, True))


def _unfused_quantiser(quantiser: OpOverload, target: str) -> Implementation:
    def run(x: Tensor, *arguments: Any) -> Tensor | tuple[Tensor, ...]:
        return _one_or_all(run_act(x, None, None, _planner(quantiser, target, arguments), False))

    return run


def _fused(producer: OpOverload, quantiser: OpOverload, keep: bool, target: str) -> Implementation:
    def run(*arguments: Any) -> Tensor | tuple[Tensor, ...]:
        mine, others = FUSED[producer, quantiser, keep][1].split(arguments)
        return _one_or_all(_produce(producer, mine, _planner(quantiser, target, others), keep))

    return run


def _planner(quantiser: OpOverload, target: str, arguments: tuple[Any, ...]) -> Planner:
    return lambda like, shape: PLANS[quantiser](like, shape, target, arguments)


@functools.cache
def graph_implementations(target: str) -> dict[OpOverload, Implementation]:
    """Return the same for a graph that is being traced with fake tensors, whatever machine this is.

    Each launch becomes a `triton_kernel_wrapper_functional` node, which Inductor compiles into the artifact.
    """
    return {operator: _into_graph(function) for operator, function in implementations(target).items()}


def _into_graph(function: Implementation) -> Implementation:
    def run(*arguments: Any) -> Tensor | tuple[Tensor, ...]:
        token = _INTO_GRAPH.set(True)
        try:
            return function(*arguments)
        finally:
            _INTO_GRAPH.reset(token)

    return run


@functools.cache
def _implementations(target: str) -> dict[OpOverload, Implementation]:
    return implementations(target)


def run_on_cuda(family: Family, operator: OpOverload, arguments: tuple[Any, ...]) -> Any:
    """Run an operator on the GPU where its first tensor is: by the kernel, else by the reference."""
    major, minor = torch.cuda.get_device_capability(arguments[0].device)
    target = f"sm_{major}{minor}"
    if obstacle(operator, arguments, target) is not None:
        return family.reference(*arguments)
    return _implementations(target)[operator](*arguments)


def _one_or_all(results: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    return results[0] if len(results) == 1 else results
