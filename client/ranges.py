"""Which sizes a graph is compiled for: the symbol that the ranges are about, and its intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy
from torch import SymInt, Tensor
from torch.fx import GraphModule
from torch.nn import Parameter

from fuse_cache.client.errors import OptionError
from fuse_cache.client.graph import Encoded, SymbolSource, input_name
from fuse_cache.client.graph_values import value_of
from fuse_cache.client.options import CompileOptions
from fuse_cache.client.warn import warn_once
from fuse_cache.proto.expression import SYMBOL, ExpressionError, SymExpr, evaluate, symbols_of
from fuse_cache.proto.graph import Role, TensorMeta
from fuse_cache.proto.pass_config import ResolvedPassConfig
from fuse_cache.proto.request import Range

# The longest context that a published model takes; sizes beyond compile locally unless max_num_batched_tokens
# or the symbol's own upper bound says more.
DEFAULT_MAX_TOKENS = 1 << 20
# Programs tell the sizes 0 and 1 apart, hardly ever more.
MOST_EXCLUDED = 8


@dataclass(frozen=True, slots=True)
class RangePlan:
    """The ranges to compile a graph for. `source` tells where a call's size is read; None: every call takes
    the one range."""

    ranges: tuple[Range, ...]
    source: SymbolSource | None = None

    def describe(self) -> str:
        """Return the ranges as users write them."""
        return ", ".join(f"[{item.lower}, {item.upper}]" for item in self.ranges)


def plan_ranges(
    encoded: Encoded,
    options: CompileOptions,
    resolved: ResolvedPassConfig,
    range_symbol: sympy.Symbol | None = None,
    *,
    is_own: bool = True,
) -> RangePlan:
    """Return the ranges of a graph.

    A graph without symbolic sizes has the one static range, whatever `compile_ranges` says: its sizes are
    burnt in. With several symbols and no `range_dim`, all of them are free in one range, unless there are
    ranges to tell apart.

    `range_symbol` is the symbol that the ranges of the whole graph are about, where this one is a piece of
    it: a piece's inputs have no names of the user's. Without `is_own` the graph is a later one of a function
    that Dynamo broke in several (`frames.py`), where the name may be gone and is no error: the ranges are
    then about its only symbol, or, with several, all are free in one range.

    Raises:
        OptionError: `range_dim` names no symbolic size, or has to be given; the message lists those there
        are.
    """
    if not encoded.symbols:
        return RangePlan((Range(),))
    if range_symbol is not None:
        symbol = encoded.symbols.index(range_symbol) if range_symbol in encoded.symbols else None
    elif not is_own:
        symbol = _carried_symbol(encoded, options)
    elif options.range_dim is not None:
        symbol = _named_symbol(encoded, *options.range_dim)
    else:
        symbol = _only_symbol(encoded, options, resolved)
    if symbol is None:
        return RangePlan((Range(),))
    sources = encoded.symbol_sources[symbol]
    if not sources:
        return RangePlan((Range(),))  # No argument tells its value, so no range could be picked by it.
    bounds = encoded.graph.symbols[symbol]
    most = options.max_num_batched_tokens or bounds.upper or DEFAULT_MAX_TOKENS
    pairs = options.compile_ranges or resolved.default_ranges(most)
    own_guards = [guard for guard in encoded.graph.guards if symbols_of(guard) == [symbol]]
    ranges = []
    for first, last in pairs:
        lower, upper = max(first, bounds.lower), min(last, bounds.upper or last)
        lower, upper = _admitted(own_guards, symbol, lower, upper)
        if lower <= upper:  # Otherwise the traced program never sees a size of this range.
            ranges.append(Range(symbol=symbol, lower=lower, upper=upper))
    return RangePlan(tuple(ranges), sources[0])


def _admitted(guards: Sequence[SymExpr], symbol: int, lower: int, upper: int) -> tuple[int, int]:
    """Leave out the ends of a range that the program was traced without, such as 1 under `length != 1`.

    Bounds are intervals and cannot say that; with the end inside, the compiler's own check of the whole range
    would refuse it. `guards` are those about this symbol alone. Empty: neither end is admitted.
    """

    def admits(size: int) -> bool:
        try:
            return all(evaluate(guard, [0] * symbol + [size]) for guard in guards)
        except ExpressionError:
            return False  # A division by zero: this size does not fit.

    while lower <= upper and not admits(lower) and lower < MOST_EXCLUDED:
        lower += 1
    if lower < upper and not admits(upper):
        upper -= 1
    if lower <= upper and not admits(lower) and not admits(upper):
        return 1, 0  # Of a program that is another one for these sizes: whoever compiles would refuse it.
    return lower, upper


def _only_symbol(encoded: Encoded, options: CompileOptions, resolved: ResolvedPassConfig) -> int | None:
    """Return the one symbol; None: there are several, and nothing depends on which of them is meant."""
    if len(encoded.symbols) == 1:
        return 0
    wanted = options.compile_ranges or resolved.default_ranges(DEFAULT_MAX_TOKENS)
    if options.compile_ranges or len(wanted) > 1:
        raise OptionError(
            f"the graph has {len(encoded.symbols)} symbolic sizes: option range_dim must name "
            f"the one that the ranges are about: {', '.join(_choices(encoded))}"
        )
    return None


def _carried_symbol(encoded: Encoded, options: CompileOptions) -> int | None:
    """Return the symbol of a later graph of a broken function; None: it cannot be told, or is a constant.

    Names outlive a break as long as the variable does, numbers of inputs do not.
    """
    if options.range_dim is not None and not options.range_dim[0].isdigit():
        try:
            return _named_symbol(encoded, *options.range_dim)
        except OptionError:
            pass
    if len(encoded.symbols) == 1:
        return 0
    if options.range_dim is not None:
        warn_once(
            f"range_dim {options.range_dim[0]}:{options.range_dim[1]} names nothing in a later graph "
            f"of a broken function, which has {len(encoded.symbols)} symbolic sizes: one artifact serves all "
            "of them there. Avoid the graph break (see TORCH_LOGS=graph_breaks), or keep the variable's name"
        )
    return None


def _named_symbol(encoded: Encoded, source: str, dim: int) -> int | None:
    """Return the symbol at dimension `dim` of an input; None: that size is a constant in this graph."""
    for position, index in enumerate(_tensor_inputs(encoded)):
        meta = encoded.graph.inputs[index].meta
        assert isinstance(meta, TensorMeta)
        if source not in (encoded.input_names[index], str(position)) or dim >= len(meta.size):
            continue
        size = meta.size[dim]
        if isinstance(size, int):
            return None
        if size.code[0] == SYMBOL and len(size.code) == 2:
            return int(size.code[1])
    raise OptionError(
        f"option range_dim={source}:{dim} names no symbolic size of the graph: "
        f"use one of {', '.join(_choices(encoded))}"
    )


def _tensor_inputs(encoded: Encoded) -> list[int]:
    """Return the indices of the inputs that calls bring, tensors only, in calling order."""
    return [
        index
        for index, item in enumerate(encoded.graph.inputs)
        if item.role is Role.INPUT and isinstance(item.meta, TensorMeta)
    ]


def _choices(encoded: Encoded) -> list[str]:
    """Return every symbolic size as an option names it."""
    found = []
    for index in _tensor_inputs(encoded):
        meta = encoded.graph.inputs[index].meta
        assert isinstance(meta, TensorMeta)
        for dim, size in enumerate(meta.size):
            if not isinstance(size, int):
                found.append(f"{encoded.input_names[index]}:{dim}")
    return found


def range_symbol_of(gm: GraphModule, options: CompileOptions, *, is_own: bool = True) -> sympy.Symbol | None:
    """Return the symbol that `range_dim` names in a graph that is cut in pieces, or None: each has one at
    most, or, without `is_own`, it cannot be told.

    Raises:
        OptionError: it names none; the message lists those there are.
    """
    if options.range_dim is None:
        return None
    source, dim = options.range_dim
    choices = []
    position = -1
    for node in gm.graph.nodes:
        value = value_of(node) if node.op == "placeholder" else None
        if not isinstance(value, Tensor) or isinstance(value, Parameter):
            continue
        position += 1
        for number, size in enumerate(value.shape):
            expression = size.node.expr if isinstance(size, SymInt) else None
            if not isinstance(expression, sympy.Symbol):
                continue
            named = (input_name(node), str(position)) if is_own else (input_name(node),)
            if source in named and dim == number:
                return expression
            choices.append(f"{input_name(node)}:{number}")
    if not choices or not is_own:
        return None  # All sizes are constants, which no range is about; or the name was lost on the way.
    names = ", ".join(choices)
    raise OptionError(
        f"option range_dim={source}:{dim} names no symbolic size of the graph: use one of {names}"
    )
