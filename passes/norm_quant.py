"""Fuses RMSNorm with the quantisation of its result: the normalised rows are never written to memory."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fuse_cache.kernels.quant_fp8_static.op import QUANT_FP8_STATIC
from fuse_cache.kernels.quant_fp8_static.reference import DIVIDE
from fuse_cache.kernels.rms_norm.op import RMS_NORM
from fuse_cache.kernels.rms_norm_quant.op import RMS_NORM_QUANT_FP8_STATIC
from fuse_cache.kernels.rms_norm_quant.reference import rms_norm_quant_fp8_static
from fuse_cache.passes.base import NearMiss, Outcome, Pass, Pattern, Reason, Setting
from fuse_cache.passes.reading import cast_source, is_call, reshape_source, size_bytes
from fuse_cache.passes.rewrite import replace_result

_NAME = "norm_quant"


def _run(graph: fx.Graph, setting: Setting) -> Outcome:
    outcome = Outcome()
    fused_norms: set[fx.Node] = set()
    for quant in graph.find_nodes(op="call_function", target=QUANT_FP8_STATIC):
        outcome.candidates += 1
        norm = quant.args[0]
        assert isinstance(norm, fx.Node)
        if (miss := _obstacle(quant, norm)) is not None:
            outcome.near_misses.append(miss)
            continue
        fused_norms.add(norm)
        outcome.bytes_saved += 2 * size_bytes(norm)  # The norm was written once and read once.
        outcome.matches += 1
        x, weight, *norm_attributes = _all_arguments(norm)
        scale, *quant_attributes = quant.args[1:]
        arguments = (x, weight, scale, *norm_attributes, *quant_attributes)
        replace_result(graph, quant, RMS_NORM_QUANT_FP8_STATIC, arguments, {})
    for norm in graph.find_nodes(op="call_function", target=RMS_NORM):
        outcome.candidates += 1
        outcome.near_misses.append(_unfused_norm(norm))
    return outcome


def _all_arguments(norm: fx.Node) -> tuple[object, ...]:
    """Return the norm's arguments; raising gives all of them by position."""
    assert len(norm.args) == len(RMS_NORM._schema.arguments)
    return norm.args


def _obstacle(quant: fx.Node, norm: fx.Node) -> NearMiss | None:
    """Say why this quantisation cannot be fused with what it reads."""

    def miss(reason: Reason, detail: str) -> NearMiss:
        return NearMiss(_NAME, reason, quant.name, detail)

    if is_call(norm, RMS_NORM):
        if len(norm.users) > 1:
            others = sorted(user.name for user in norm.users if user is not quant)
            return miss(Reason.EXTRA_USER, f"the norm {norm.name} is read by {', '.join(others)} too")
        return None
    if is_call(inner := reshape_source(norm), RMS_NORM):
        return miss(Reason.EXTRA_VIEW, f"{norm.name} reshapes the norm {inner.name} first")
    if is_call(inner := cast_source(norm), RMS_NORM):
        return miss(Reason.CAST_BETWEEN, f"{norm.name} casts the norm {inner.name} first")
    return miss(Reason.NO_PARTNER, f"it reads {norm.name}, which is no norm")


def _unfused_norm(norm: fx.Node) -> NearMiss:
    """Say why this norm was left: its quantisation's near miss is counted apart."""
    readers = sorted(user.name for user in norm.users)
    if any(is_call(user, QUANT_FP8_STATIC) for user in norm.users):
        return NearMiss(_NAME, Reason.EXTRA_USER, norm.name, f"it is read by {', '.join(readers)}")
    return NearMiss(_NAME, Reason.NO_PARTNER, norm.name, "no quantisation reads it")


def _search(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    norm = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(torch.bfloat16)
    return (norm / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def _replacement(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return rms_norm_quant_fp8_static(
        x,
        weight,
        scale,
        1e-6,
        0.0,
        None,
        torch.bfloat16,
        None,
        DIVIDE,
        torch.bfloat16,
        -448.0,
        448.0,
        torch.float8_e4m3fn,
    )


def _example_inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 64, generator=generator).to(torch.bfloat16)
    return x, torch.randn(64, generator=generator).to(torch.bfloat16), torch.tensor(0.02)


PASS = Pass(
    name=_NAME,
    run=_run,
    patterns=(Pattern("rms_norm + static fp8", _search, _replacement, _example_inputs),),
)
