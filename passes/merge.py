"""Merges equal calls of our own operators: they are functions of their arguments."""

from __future__ import annotations

import operator

from torch import fx

from fuse_cache.kernels.library import NAMESPACE
from fuse_cache.passes.cleanup import has_effect
from fuse_cache.passes.inline import is_ours


def merge_equal(graph: fx.Graph) -> None:
    """Merge calls of ours that are equal: three projections of one norm quantise it three times."""
    first: dict[object, fx.Node] = {}
    for node in list(graph.nodes):
        if node._erased:
            continue  # A result of a call that was merged.
        if node.op == "call_function" and has_effect(node):
            first.clear()  # A write could have changed what a later call reads.
        elif is_ours(node, NAMESPACE):
            kept = first.setdefault((node.target, node.args), node)
            if kept is not node:
                _read_from(graph, node, kept)


def _read_from(graph: fx.Graph, node: fx.Node, kept: fx.Node) -> None:
    """Let the readers of one call read another, equal one, result by result."""
    items = {user.args[1]: user for user in kept.users if user.target is operator.getitem}
    for user in list(node.users):
        if user.target is operator.getitem and user.args[1] in items:
            user.replace_all_uses_with(items[user.args[1]])
            graph.erase_node(user)
    node.replace_all_uses_with(kept)
    graph.erase_node(node)
