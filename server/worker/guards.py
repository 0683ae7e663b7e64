"""What the compiler assumed of the symbolic sizes, as expressions that a host checks. Nothing is evaluated
as text, here or there.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fuse_cache.kernels.sizes import NoFormError, UnknownSymbolError, expression_of
from fuse_cache.proto import expression
from fuse_cache.proto.expression import Dim, ExpressionError, SymExpr
from fuse_cache.proto.expression_text import to_text
from fuse_cache.proto.graph import Symbol
from fuse_cache.server.worker.errors import NotCacheable

# The largest number of elements that 32-bit indices reach, which is what GPU kernels are compiled with.
_MOST_ELEMENTS = 2**31 - 1
# Values of this many other symbols are tried together: 4^6 combinations of 3 us.
_MAX_OTHERS = 6


def artifact_guards(shape_env: ShapeEnv, numbers: Mapping[sympy.Symbol, int]) -> tuple[SymExpr, ...]:
    """Return the guards that the compiler left in `shape_env`, sorted, each once. `numbers` gives each
    symbol its number.

    Raises:
        NotCacheable: a guard is about something that is no size of an input, or uses a function that has no
        encoding.
    """
    found = {encode_guard(guard.expr, numbers) for guard in shape_env.guards if guard.expr is not sympy.true}
    return tuple(
        sorted((guard for guard in found if isinstance(guard, SymExpr)), key=lambda guard: guard.code)
    )


def encode_guard(expr: sympy.Basic, numbers: Mapping[sympy.Symbol, int]) -> Dim:
    """Encode one expression over symbols.

    Raises:
        NotCacheable: it has no encoding; the message names the function.
    """
    try:
        return expression_of(expr, numbers)
    except UnknownSymbolError as error:
        raise NotCacheable(
            f"the compiled code depends on {error.symbol}, which is no size of an input"
        ) from None
    except NoFormError as error:
        raise NotCacheable(f"the compiled code is guarded by {error}") from error


def check_covers_range(
    guards: Sequence[SymExpr], bounds: Sequence[Symbol], hints: Sequence[int], ranged: int | None
) -> None:
    """Make sure that the guards hold at both ends of the compile range: of symbol `ranged`, within `bounds`.

    A compiler that burnt in a size would otherwise give an artifact that refuses nearly every call of its
    range. The other symbols may take any of a few values that fit: `hints`, their own ends, or that same
    end where a guard ties them together. That no tensor outgrows 32-bit indices is left to the call's own
    check: only the largest calls of a range can break it, and they need gigabytes for one tensor.

    Raises:
        NotCacheable: they do not; the message shows the guard and the size.
    """
    if ranged is None:
        return
    guards = [guard for guard in guards if _MOST_ELEMENTS not in guard.code]
    others = sorted({number for guard in guards for number in expression.symbols_of(guard)} - {ranged})
    for end in sorted({bounds[ranged].lower, bounds[ranged].upper or bounds[ranged].lower}):
        choices = [_choices(bounds[number], hints[number], end) for number in others[:_MAX_OTHERS]]
        for chosen in itertools.product(*choices):
            values = list(hints)
            values[ranged] = end
            for number, value in zip(others, chosen, strict=False):
                values[number] = value
            broken = next((guard for guard in guards if not _holds(guard, values)), None)
            if broken is None:
                break
            assumed = to_text(broken)
        else:
            raise NotCacheable(
                f"the compiled code does not cover size {end} of its range: it assumes {assumed}"
            )


def _holds(guard: SymExpr, values: Sequence[int]) -> bool:
    try:
        return bool(expression.evaluate(guard, values))
    except ExpressionError:
        return False  # a division by zero: these sizes do not fit


def _choices(bounds: Symbol, hint: int, end: int) -> list[int]:
    upper = bounds.upper if bounds.upper is not None else max(hint, end)
    found = (hint, bounds.lower, upper, min(max(end, bounds.lower), upper))
    return list(dict.fromkeys(found))
