"""Spells every IR node out again: by what the target has for it, at last by its reference in ATen.

Runs after Inductor's own rewriting, so that nothing rewrites the roundings. No operator of ours is left: a
host needs none.
"""

from __future__ import annotations

from torch import fx
from torch._ops import OpOverload

from fuse_cache.kernels.library import NAMESPACE
from fuse_cache.passes.base import Outcome, Pass, Setting
from fuse_cache.passes.implementations import choose
from fuse_cache.passes.inline import Inliner, is_ours


def _run(graph: fx.Graph, setting: Setting) -> Outcome:
    outcome = Outcome()
    inliner = Inliner()
    for node in list(graph.nodes):
        if is_ours(node, NAMESPACE):
            assert isinstance(node.target, OpOverload)
            chosen = choose(node.target, setting)
            inliner.inline(graph, node, chosen.function, exact=chosen.exact)
            outcome.candidates += 1
            outcome.matches += 1
    return outcome


PASS = Pass(name="lower_ir", run=_run)
