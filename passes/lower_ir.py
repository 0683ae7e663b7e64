"""Spells every IR node out again in ATen: on the CPU the reference is the kernel, and Inductor fuses it.

Runs after Inductor's own rewriting, so that nothing rewrites the roundings. No operator of ours is left: a
host needs none.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx
from torch._ops import OpOverload

from fuse_cache.kernels.library import NAMESPACE
from fuse_cache.kernels.quant_fp8_static.op import QUANT_FP8_STATIC
from fuse_cache.kernels.quant_fp8_static.reference import quant_fp8_static
from fuse_cache.kernels.rms_norm.op import RMS_NORM
from fuse_cache.kernels.rms_norm.reference import rms_norm
from fuse_cache.kernels.rms_norm_quant.op import RMS_NORM_QUANT_FP8_STATIC
from fuse_cache.kernels.rms_norm_quant.reference import rms_norm_quant_fp8_static
from fuse_cache.passes.base import Outcome, Pass, Setting
from fuse_cache.passes.inline import Inliner, Reference, is_ours


@dataclass(frozen=True, slots=True)
class Lowering:
    """What takes an operator's place. Only what is fused needs `exact_reductions` (`Inliner.inline`)."""

    reference: Reference
    exact_reductions: bool = False


_REFERENCES: dict[OpOverload, Lowering] = {
    RMS_NORM: Lowering(rms_norm),
    QUANT_FP8_STATIC: Lowering(quant_fp8_static),
    RMS_NORM_QUANT_FP8_STATIC: Lowering(rms_norm_quant_fp8_static, exact_reductions=True),
}


def _run(graph: fx.Graph, setting: Setting) -> Outcome:
    outcome = Outcome()
    inliner = Inliner()
    for node in list(graph.nodes):
        if is_ours(node, NAMESPACE):
            assert isinstance(node.target, OpOverload)
            lowering = _REFERENCES[node.target]
            inliner.inline(graph, node, lowering.reference, exact_reductions=lowering.exact_reductions)
            outcome.candidates += 1
            outcome.matches += 1
    return outcome


PASS = Pass(name="lower_ir", run=_run)
