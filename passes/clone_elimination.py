"""Clone elimination: copies that lowering left behind, or that were needed until something was fused, go."""

from __future__ import annotations

from torch import fx

from fuse_cache.passes.aliasing import Aliasing
from fuse_cache.passes.base import Outcome, Pass, Setting
from fuse_cache.passes.copies import COPIES, copied, is_needless


def _run(graph: fx.Graph, setting: Setting) -> Outcome:
    outcome = Outcome()
    copies = [node for node in graph.nodes if node.op == "call_function" and node.target in COPIES]
    if not copies:
        return outcome
    aliasing = Aliasing(graph)
    for node in copies:
        source = copied(node)
        if source is None:
            continue  # It changes dtype, sizes or strides.
        outcome.candidates += 1
        if is_needless(node, source, aliasing):
            node.replace_all_uses_with(source)
            aliasing.join(node, source)
            graph.erase_node(node)
            outcome.matches += 1
    return outcome


PASS = Pass(name="clone_elimination", run=_run)
