"""Graphs whose inputs are tensors made of tensors (DTensor, quantised weights), taken apart by AOTAutograd.

The ATen graph that is left has plain tensors only, and can be sent. AOTAutograd's own wrapper, which takes
the inputs apart and puts the outputs together, stays in this process: it is code, and belongs to the host's
libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from fuse_cache.client.unkeyable import UnkeyableGraph

# Compiles a flat graph: takes it and its fake inputs, returns a function of flat arguments.
CompileFlat: TypeAlias = Callable[[GraphModule, Sequence[Any]], Callable[..., Sequence[Any]]]


def desugar_to_aten(
    gm: GraphModule, example_inputs: Sequence[Any], compile_flat: CompileFlat
) -> Callable[..., Any]:
    """Take `gm` to ATen level, hand that graph to `compile_flat`, and return a function called as `gm` is.

    Call it inside the backend, where Dynamo's tracing context is alive. Writes to inputs stay in the graph.

    Raises:
        UnkeyableGraph: the inputs need gradients; only inference is taken apart.
    """
    if torch.is_grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in example_inputs
    ):
        raise UnkeyableGraph("inputs that need gradients: call the model under torch.no_grad()")

    def compile_boxed(flat: GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Sequence[Any]]:
        compiled = compile_flat(flat, inputs)

        def run(arguments: list[Any]) -> Sequence[Any]:
            taken = tuple(arguments)
            arguments.clear()  # The caller gives them up, so that memory is freed as early as without us.
            return compiled(*taken)

        run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's mark for this calling convention
        return run

    to_aten: Any = aot_autograd(
        fw_compiler=compile_boxed,
        inference_compiler=compile_boxed,
        keep_inference_input_mutations=True,
    )
    compiled: Callable[..., Any] = to_aten(gm, list(example_inputs))
    return compiled
