"""Traces a model as a host would, on fake tensors, and notes what it would ask the daemon for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import sympy
import torch
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

# Sizes that no model has and none of which divides another: two names must not become one symbol.
_HINTS: Final = (37, 41, 43, 47, 53, 59, 61, 67, 71, 73)


@dataclass(slots=True)
class Traced:
    """What one model asks for, each want once, and why some of its graphs ask for nothing."""

    wants: list[Want] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def add(self, wants: Sequence[Want]) -> None:
        """Note wants; one that another graph has too is noted once."""
        known = {want.request_digest for want in self.wants}
        self.wants += [want for want in wants if want.request_digest not in known]


def trace(plan: ModelPlan, options: CompileOptions, targets: Sequence[str], device: str) -> Traced:
    """Return what a host asks for that calls the plan's model, for `targets` of one kind of device.

    Raises:
        ModelError: the model cannot be made, or does not run on fake tensors; the message names the operator.
        OptionError: an option does not fit the model.
    """
    traced = Traced()

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def note(gm: GraphModule, inputs: Sequence[Any], *_: Any, **known: Any) -> _Noted:
            return _Noted(gm, inputs, options, targets, traced, **known)

        return compile_graph(gm, example_inputs, options, note)

    trace_size_obliviously()
    torch._dynamo.reset()
    with fake_mode(), torch.no_grad():
        model = make_model(plan, device)
        arguments = _arguments(plan.inputs, device)
        try:
            torch.compile(model, backend=backend)(**arguments)
        except Exception as error:
            raise _explained(error) from error
        finally:
            torch._dynamo.reset()
    if not traced.wants and not traced.refused:
        raise ModelError("the call compiles no graph: nothing in it is a tensor operation")
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
            self._traced.add(asked.wants)
        return self._gm.forward

    def run_locally(self, reason: str) -> Callable[..., Any]:
        """Note why a host compiles the graph itself. One that computes nothing needs no artifact."""
        if "computes nothing" not in reason:
            self._traced.refused.append(reason)
        return self._gm.forward


def _arguments(inputs: Sequence[InputPlan], device: str) -> dict[str, Any]:
    names = dict.fromkeys(size for item in inputs for size in item.shape if isinstance(size, str))
    if len(names) > len(_HINTS):
        raise OptionError(f"inputs: {len(names)} sizes that vary, at most {len(_HINTS)} can be told apart")
    hints = dict(zip(names, _HINTS, strict=False))
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
