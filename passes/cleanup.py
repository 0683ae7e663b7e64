"""Dead code elimination that knows what writes: a node without users goes unless it has an effect."""

from __future__ import annotations

import torch
from torch import fx
from torch._ops import OpOverload

from fuse_cache.kernels.library import NAMESPACE
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
    target = node.target
    if isinstance(target, OpOverload) and target.namespace in _FIXED:
        if target not in _effects:
            _effects[target] = _has_effect(node)
        return _effects[target]
    return _has_effect(node)


# What these operators do is the operator's own: it depends neither on a call's arguments nor on what is
# registered later. Graphs have thousands of calls of some forty of them.
_FIXED = frozenset({"aten", "prims", NAMESPACE})
_effects: dict[OpOverload, bool] = {}


def _has_effect(node: fx.Node) -> bool:
    if writes(node) or node.is_impure():
        return True
    # Drawing from a generator moves it on: what is drawn later would change.
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


PASS = Pass(name="cleanup", run=_run)
