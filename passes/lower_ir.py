"""Spells every IR node out again: by what the target has for it, at last by its reference in ATen.

On a GPU a fused operator becomes the launch of its kernel, which the artifact then carries. Runs after
Inductor's own rewriting, so that nothing rewrites the roundings. No operator of ours is left: a host needs
none.
"""

from __future__ import annotations

from torch import fx
from torch._ops import OpOverload

from fuse_cache.kernels.library import NAMESPACE
from fuse_cache.passes.base import NearMiss, Outcome, Pass, Setting
from fuse_cache.passes.implementations import choose, is_fused, obstacle
from fuse_cache.passes.inline import Inliner, is_ours

_NAME = "lower_ir"


def _run(graph: fx.Graph, setting: Setting) -> Outcome:
    outcome = Outcome()
    inliner = Inliner()
    for node in list(graph.nodes):
        if not is_ours(node, NAMESPACE):
            continue
        assert isinstance(node.target, OpOverload)
        outcome.candidates += 1
        # Fusion asked before; what ran since may have changed how the operands lie in memory.
        missing = obstacle(node.target, node.args, setting) if is_fused(node.target) else None
        if missing is not None:
            outcome.near_misses.append(NearMiss(_NAME, missing.reason, node.name, missing.detail))
        else:
            outcome.matches += 1
        inliner.inline(graph, node, choose(node.target, node.args, setting))
    return outcome


PASS = Pass(name=_NAME, run=_run)
