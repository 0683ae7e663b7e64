"""What computes each operator of ours on each target, the best first."""

from __future__ import annotations

from dataclasses import dataclass

from torch._ops import OpOverload

from fuse_cache.kernels.fused_quant.op import FUSED, PRODUCERS, QUANTISERS
from fuse_cache.kernels.library import Reference
from fuse_cache.passes.base import Setting


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute an operator, for the target families in `families` (empty: for all).

    `function` is traced into the graph. `exact`: PyTorch's own kernels compute what generated code
    would compute otherwise (`inline.py`).
    """

    name: str
    function: Reference
    families: frozenset[str] = frozenset()
    exact: bool = False


# In the order of preference. Every operator's last is its reference, which Inductor compiles anywhere.
PRIORITIES: dict[OpOverload, tuple[Implementation, ...]] = {
    **{
        target: (Implementation("reference", family.reference),)
        for target, family in (PRODUCERS | QUANTISERS).items()
    },
    **{
        target: (
            Implementation("exact reference", fused.reference, frozenset({"cpu"}), exact=True),
            Implementation("reference", fused.reference),
        )
        for target, fused in FUSED.values()
    },
}


def choose(target: OpOverload, setting: Setting) -> Implementation:
    """Return the first implementation of an operator that the target has."""
    return next(one for one in PRIORITIES[target] if not one.families or setting.family in one.families)
