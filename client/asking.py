"""From a captured graph to what is asked of the daemon: its bytes, its target, its passes, one want for each
range. Asks nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from torch.fx import GraphModule

from fuse_cache.client.graph import Encoded, UnkeyableGraph, capture_ambient, encode_graph
from fuse_cache.client.options import CompileOptions
from fuse_cache.client.ranges import RangePlan, plan_ranges
from fuse_cache.client.target import Target, choose_target, device_of
from fuse_cache.client.verify import Want
from fuse_cache.client.warn import warn_once
from fuse_cache.proto.graph import GroupSpec, Role, TensorMeta
from fuse_cache.proto.pass_config import PassContext, ResolvedPassConfig
from fuse_cache.proto.pass_tables import DTYPE_BYTES
from fuse_cache.proto.request import Range, RequestFields


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one graph comes to. `wants` has one for each of the plan's ranges; none without a target."""

    encoded: Encoded
    target: Target
    resolved: ResolvedPassConfig
    plan: RangePlan
    wants: tuple[Want, ...]


def encode(gm: GraphModule, example_inputs: Sequence[Any], options: CompileOptions) -> Encoded:
    """Return the graph as plain data.

    Raises:
        UnkeyableGraph: it cannot be keyed, or no artifact can serve it.
    """
    groups = {options.tp_group: GroupSpec("tp", options.tp)} if options.tp_group else None
    encoded = encode_graph(gm, example_inputs, groups=groups)
    if not encoded.graph.nodes:
        raise UnkeyableGraph("the graph computes nothing")
    # An input says so only where the graph has grad mode on, at its start or in it.
    inputs = encoded.graph.inputs
    if any(isinstance(one.meta, TensorMeta) and one.meta.requires_grad for one in inputs):
        raise UnkeyableGraph(
            "grad mode is on and an input requires grad: artifacts are for inference, "
            "use torch.no_grad() or torch.inference_mode()"
        )
    return encoded


def resolve(
    options: CompileOptions,
    example_inputs: Sequence[Any],
    offered: Sequence[str] = (),
    encoded: Encoded | None = None,
) -> tuple[Target, ResolvedPassConfig]:
    """Choose the target among what the daemon offers, and decide which passes run for it."""
    device = device_of(example_inputs)
    target = choose_target(options.target, device, offered)
    context = PassContext(
        target=target.name or device.type,
        tp=options.tp,
        dense=options.dense,
        max_num_batched_tokens=options.max_num_batched_tokens,
        dtype=_activation_dtype(encoded),
    )
    resolved = options.pass_config.resolve(context, options.level)
    for warning in resolved.warnings:
        warn_once(f"pass_config: {warning}")
    return target, resolved


def ask(
    encoded: Encoded,
    example_inputs: Sequence[Any],
    options: CompileOptions,
    offered: Sequence[str],
    *,
    range_symbol: sympy.Symbol | None = None,
    is_own: bool = True,
) -> Asked:
    """Return what to ask for. `range_symbol` and `is_own` as of `plan_ranges`.

    Raises:
        OptionError: of `range_dim`.
    """
    target, resolved = resolve(options, example_inputs, offered, encoded)
    plan = plan_ranges(encoded, options, resolved, range_symbol, is_own=is_own)
    for warning in resolved.warnings_for(plan.ranges):
        warn_once(f"pass_config: {warning}")
    wants = [_want(encoded, options, target, resolved, item) for item in plan.ranges if target.name]
    return Asked(encoded=encoded, target=target, resolved=resolved, plan=plan, wants=tuple(wants))


def _want(
    encoded: Encoded,
    options: CompileOptions,
    target: Target,
    resolved: ResolvedPassConfig,
    compile_range: Range,
) -> Want:
    fields = RequestFields(
        graph_digest=encoded.digest,
        pass_config=resolved.encode(),
        range=compile_range,
        target=target.name,
        target_facts=target.facts,
        inductor_options=options.inductor,
        attention_backend=options.attention_backend,
        ambient=capture_ambient(),
    )
    return Want.of(fields, encoded.data, resolved, allow_covering=options.compile_ranges is None)


def _activation_dtype(encoded: Encoded | None) -> str:
    """Return the dtype of the model's activations, taken to be that of its first floating parameter or
    input."""
    metas = [item for item in encoded.graph.inputs if isinstance(item.meta, TensorMeta)] if encoded else []
    metas.sort(key=lambda item: item.role is not Role.PARAMETER)
    for item in metas:
        if isinstance(item.meta, TensorMeta) and item.meta.dtype in DTYPE_BYTES:
            return item.meta.dtype
    return "bfloat16"
