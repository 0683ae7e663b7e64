"""Traces a model as a host would, on fake tensors, and notes what it would ask the daemon for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import sympy
import torch
from torch import nn
from torch.fx import GraphModule

from fuse_cache.client.asking import ask, encode
from fuse_cache.client.backend import compile_graph
from fuse_cache.client.errors import OptionError
from fuse_cache.client.graph import UnkeyableGraph
from fuse_cache.client.options import CompileOptions
from fuse_cache.client.tracing import trace_size_obliviously
from fuse_cache.client.verify import Want
from fuse_cache.client.warm.manifest import InputPlan, ModelPlan
from fuse_cache.client.warm.weightless import ModelError, fake_mode, make_model

# Sizes for those that vary, in a first and in a second call. Primes: no two names shall become one symbol.
_HINTS: Final = ((37, 41, 43, 47, 53, 59, 61, 67, 71, 73), (79, 83, 89, 97, 101, 103, 107, 109, 113, 127))


@dataclass(slots=True)
class Traced:
    """What one model asks for, each want once, and why some of its graphs ask for nothing. `fixed` are the
    digests of wants whose graphs have no size that varies; `at_first` wants were asked for at the first call.
    """

    wants: list[Want] = field(default_factory=list)
    fixed: set[bytes] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)
    at_first: int = 0

    def add(self, wants: Sequence[Want], *, fixed: bool) -> None:
        """Note wants; one that another graph has too is noted once."""
        known = self.digests()
        self.wants += [want for want in wants if want.request_digest not in known]
        if fixed:
            self.fixed.update(want.request_digest for want in wants)

    def digests(self) -> set[bytes]:
        """Return what tells the wants apart."""
        return {want.request_digest for want in self.wants}


def trace(plan: ModelPlan, options: CompileOptions, targets: Sequence[str], device: str) -> Traced:
    """Return what a host asks for that calls the plan's model, for `targets` of one kind of device.

    Raises:
        ModelError: the model cannot be made, or does not run on fake tensors; the message names the operator.
        OptionError: an option does not fit the model.
    """
    names = _names(plan.inputs)
    sizes = example_sizes(plan.inputs, names, options)
    trace_size_obliviously()
    with fake_mode(), torch.no_grad():
        model = make_model(plan, device)
        calls = [_arguments(plan.inputs, one, device) for one in sizes]
        other = _arguments(plan.inputs, dict(zip(names, _HINTS[1], strict=False)), device)
        try:
            traced = _calls(model, calls, options, targets)
            # A program that tells its sizes apart is another graph for a host that begins with another range.
            starts = range(len(calls)) if len(traced.wants) > traced.at_first else range(1)
            for start in starts:
                order = [*calls[start:], *calls[:start]]
                one = _calls(model, order, options, targets) if start else traced
                if names and one.fixed:
                    one = _without_examples(
                        _calls(model, [*order, other], options, targets),
                        _calls(model, [other, *order], options, targets),
                    )
                if start:
                    traced.add(one.wants, fixed=False)
                else:
                    traced = one
        finally:
            torch._dynamo.reset()
    if not traced.wants and not traced.refused:
        raise ModelError("the call compiles no graph: nothing in it is a tensor operation")
    return traced


def _without_examples(one: Traced, other: Traced) -> Traced:
    """Return what does not hang on the sizes that the calls were made with.

    After a graph break Dynamo takes the sizes of a first call for constants, and sees that they vary at the
    second: what is asked for at the first is of no use to a host that has other sizes.
    """
    kept = [
        want
        for want in one.wants
        if want.request_digest not in one.fixed or want.request_digest in other.digests()
    ]
    return replace(one, wants=kept)


def _calls(
    model: nn.Module, calls: Sequence[dict[str, Any]], options: CompileOptions, targets: Sequence[str]
) -> Traced:
    """Return what is asked for by these calls of the model, one after the other."""
    traced = Traced()

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def note(gm: GraphModule, inputs: Sequence[Any], *_: Any, **known: Any) -> _Noted:
            return _Noted(gm, inputs, options, targets, traced, **known)

        return compile_graph(gm, example_inputs, options, note)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    try:
        for number, arguments in enumerate(calls):
            compiled(**arguments)
            traced.at_first = traced.at_first if number else len(traced.wants)
    except Exception as error:
        raise _explained(error) from error
    return traced


class _Noted:
    """Stands for `GraphBuild`: notes the wants of a graph and has it run as it is."""

    def __init__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        options: CompileOptions,
        targets: Sequence[str],
        traced: Traced,
        *,
        range_symbol: sympy.Symbol | None = None,
        is_own: bool = True,
        may_compile_here: bool = True,
    ) -> None:
        self._gm = gm
        self._inputs = example_inputs
        self._options = options
        self._targets = targets
        self._traced = traced
        self._range_symbol = range_symbol
        self._is_own = is_own

    def run(self) -> Callable[..., Any]:
        """Note what the graph asks for."""
        try:
            encoded = encode(self._gm, self._inputs, self._options)
        except UnkeyableGraph as error:
            return self.run_locally(f"not cacheable: {error.reason}")
        for target in self._targets:
            options = replace(self._options, target=target)
            asked = ask(
                encoded, self._inputs, options, (), range_symbol=self._range_symbol, is_own=self._is_own
            )
            self._traced.add(asked.wants, fixed=not encoded.graph.symbols)
        return self._gm.forward

    def run_locally(self, reason: str) -> Callable[..., Any]:
        """Note why a host compiles the graph itself. One that computes nothing needs no artifact."""
        if "computes nothing" not in reason:
            self._traced.refused.append(reason)
        return self._gm.forward


def _names(inputs: Sequence[InputPlan]) -> list[str]:
    """Return the sizes that vary.

    Raises:
        OptionError: more than can be told apart.
    """
    names = list(dict.fromkeys(size for item in inputs for size in item.shape if isinstance(size, str)))
    if len(names) > len(_HINTS[0]):
        raise OptionError(f"inputs: {len(names)} sizes that vary, at most {len(_HINTS[0])} can be told apart")
    return names


def example_sizes(
    inputs: Sequence[InputPlan], names: Sequence[str], options: CompileOptions
) -> list[dict[str, int]]:
    """Return the sizes of the calls that are traced: one for each range, with a size of that range."""
    base = dict(zip(names, _HINTS[0], strict=False))
    name = _range_name(inputs, names, options)
    if name is None or options.compile_ranges is None:
        return [base]
    others = {size for other, size in base.items() if other != name}
    found = []
    for lower, upper in options.compile_ranges:
        size = max(2, (lower + upper) // 2)  # Dynamo takes a size of 1 for a constant, if it sees it first.
        while size in others:
            size += 1
        found.append({**base, name: size})
    return found


def _range_name(inputs: Sequence[InputPlan], names: Sequence[str], options: CompileOptions) -> str | None:
    """Return the name of the size that the ranges are about; None: tracing will say that there is none."""
    if options.range_dim is None:
        return names[0] if len(names) == 1 else None
    source, dim = options.range_dim
    tensors = [item for item in inputs if item.value is None]
    for position, item in enumerate(tensors):
        if source in (item.name, str(position)) and dim < len(item.shape):
            size = item.shape[dim]
            return size if isinstance(size, str) else None
    return None


def _arguments(inputs: Sequence[InputPlan], hints: Mapping[str, int], device: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in inputs:
        if item.value is not None:
            found[item.name] = item.value
            continue
        shape = [hints[size] if isinstance(size, str) else size for size in item.shape]
        tensor = torch.empty(shape, dtype=getattr(torch, item.dtype), device=device)
        for dimension, size in enumerate(item.shape):
            if isinstance(size, str):
                torch._dynamo.mark_dynamic(tensor, dimension)
        found[item.name] = tensor
    return found


def _explained(error: Exception) -> Exception:
    """Return an error that says what a person can do about it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OptionError | ModelError):
            return cause
        function = getattr(cause, "func", None)  # Of fake tensors' own errors: the operator.
        if function is not None:
            return ModelError(
                f"{function} needs the values of a tensor, and tracing has none: "
                "call the model without it, or warm it from a host"
            )
        # Dynamo wraps what a backend raises, and keeps it aside.
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    message = str(error).strip().partition("\n")[0][:500]
    return ModelError(f"it does not run on fake tensors: {type(error).__name__}: {message}")
