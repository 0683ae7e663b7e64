"""Dead code elimination that knows what writes: a node without users goes unless it has an effect."""

from __future__ import annotations

import torch
from torch import fx
from torch._ops import OpOverload

from fuse_cache.passes.aliasing import writes
from fuse_cache.passes.base import Outcome, Pass, Setting


def _run(graph: fx.Graph, setting: Setting) -> Outcome:
    outcome = Outcome()
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or node.users:
            continue
        outcome.candidates += 1
        if not has_effect(node):
            graph.erase_node(node)
            outcome.matches += 1
    return outcome


def has_effect(node: fx.Node) -> bool:
    """Return whether running the node matters even if nothing reads its result."""
    if writes(node) or node.is_impure():
        return True
    # Drawing from a generator moves it on: what is drawn later would change.
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


PASS = Pass(name="cleanup", run=_run)
