"""What computes each operator of ours on each target, and why a kernel cannot (DECISIONS/0062)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch._ops import OpOverload

from fuse_cache.kernels.fused_quant.op import FUSED, PRODUCERS, QUANTISERS
from fuse_cache.kernels.library import Reference
from fuse_cache.passes.base import Reason, Setting
from fuse_cache.passes.raised import Miss

# Tensors on meta stand for those of the target: graphs are lowered for GPUs that are not here.
_GPU_DEVICES = frozenset({"cuda", "meta"})


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute an operator. `function` is traced into the graph.

    `exact`: PyTorch's own kernels compute what generated code would compute otherwise (`inline.py`).
    """

    name: str
    function: Reference
    exact: bool = False


_FUSED = dict(FUSED.values())
_REFERENCES: dict[OpOverload, Reference] = {
    **{target: family.reference for target, family in (PRODUCERS | QUANTISERS).items()},
    **{target: fused.reference for target, fused in _FUSED.items()},
}


def choose(target: OpOverload, arguments: Sequence[object], setting: Setting) -> Implementation:
    """Return the best implementation of an operator for these arguments.

    A fused operator is a Triton kernel on a GPU, and on a CPU its reference with PyTorch's own means and
    exponentials. What is not fused is its reference everywhere: Inductor fuses that with its neighbours.
    """
    reference = _REFERENCES[target]
    if target not in _FUSED:
        return Implementation("reference", reference)
    if setting.family == "cpu":
        return Implementation("exact reference", reference, exact=True)
    if obstacle(target, arguments, setting) is None:
        # Not at import: it needs Triton.
        from fuse_cache.kernels.launch import graph_implementations

        return Implementation("triton", graph_implementations(setting.target)[target])
    return Implementation("reference", reference)


def is_fused(target: OpOverload) -> bool:
    """Return whether an operator is one that fusion puts in the place of two."""
    return target in _FUSED


def obstacle(target: OpOverload, arguments: Sequence[object], setting: Setting) -> Miss | None:
    """Say why the target has no kernel for this call of a fused operator; None where it has one.

    Arguments are nodes or constants. On a CPU the reference counts as the kernel.
    """
    if setting.family == "cpu":
        return None
    values = tuple(one.meta["val"] if isinstance(one, fx.Node) else one for one in arguments)
    devices = {one.device.type for one in values if isinstance(one, torch.Tensor) and one.dim() > 0}
    if not devices <= _GPU_DEVICES:
        elsewhere = " and ".join(sorted(devices - _GPU_DEVICES))
        return Miss(Reason.TARGET, f"the kernels are for {setting.target}, and the values are on {elsewhere}")
    # Not at import: nothing else here needs the tables of the kernels.
    from fuse_cache.kernels.obstacles import obstacle as obstacle_of_kernel

    detail = obstacle_of_kernel(target, values, setting.target)
    return None if detail is None else Miss(Reason.OP_MISSING, detail)
