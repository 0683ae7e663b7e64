"""Which of two sizes is the smaller one, where one is the other rounded up to a multiple. Torch does not tell
while it traces size-obliviously.
"""

from __future__ import annotations

import sympy
from torch.utils._sympy import functions as torch_sympy


def smaller_of(one: object, other: object) -> sympy.Expr | None:
    """Return the smaller of two sizes if that is so whatever their symbols are; None if it cannot be told.

    `s` is no more than `m * ((s + m - 1) // m)`: rows, and the rows of a tensor that pads them.
    """
    for small, large in ((one, other), (other, one)):
        if isinstance(small, sympy.Expr) and _is_rounded_up(large, small):
            return small
    return None


def without_min(expr: object) -> object:
    """Return what an expression is, and of the smaller of two sizes which one it is, if that can be told."""
    if isinstance(expr, (sympy.Min, torch_sympy.Min)) and len(expr.args) == 2:
        return smaller_of(*expr.args) or expr
    return expr


def _is_rounded_up(large: object, small: sympy.Expr) -> bool:
    if not isinstance(large, sympy.Mul) or len(large.args) != 2:
        return False
    unit, count = large.args
    if not isinstance(unit, sympy.Integer) or unit < 1 or not isinstance(count, torch_sympy.FloorDiv):
        return False
    raised, by = count.args
    return bool(by == unit and raised - small == unit - 1)
