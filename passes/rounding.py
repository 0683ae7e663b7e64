"""Whether a graph must be compiled with the rounding that it states. One rule, for artifacts and for local
builds: their results have the same bits.

Left alone, Inductor keeps float32 inside a loop where the graph casts to bf16 and back, which moves 2 % of
the codes of a quantisation behind it. What is asked for here prevents that on GPUs, and on CPUs from torch
2.13 on; 2.11 knows the option for Triton alone and compiles for a CPU as before.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

OPTION = "emulate_precision_casts"
# Triton's own division of float32 is an approximation, and a scale divides. Torch 2.11 heeds this for
# quotients and not for reciprocals, 2.13 for both.
DIVISION = "eager_numerics.division_rounding"
# One step of these is seen in results: FP8 codes, INT8 codes, two FP4 codes in a byte.
_CODES = (torch.int8, torch.uint8)
_FAMILIES = ("cpu", "sm")


def rounding_patches(gm: fx.GraphModule | None, family: str) -> dict[str, object]:
    """Return the Inductor options that keep the rounding of `gm`, at any level of tracing.

    They depend on the graph and the target only, not on which passes are on: a fusion that is switched off
    must not move a code. Without a graph it is taken to quantise.
    """
    if family not in _FAMILIES or not (gm is None or quantises(gm)):
        return {}
    return {OPTION: True, DIVISION: True} if family == "sm" else {OPTION: True}


def quantises(gm: fx.GraphModule) -> bool:
    """Return whether a value in the graph, or inside of a tensor subclass there, holds codes.

    Inputs count: a subclass that Dynamo hides becomes plain inputs at ATen level, where the answer must be
    the same.
    """
    graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
    return any(_has_codes(node) for graph in graphs for node in graph.nodes)


def _has_codes(node: fx.Node) -> bool:
    found: list[object] = [node.meta.get("example_value"), node.meta.get("val"), node.args, node.kwargs]
    while found:
        value = found.pop()
        if isinstance(value, (tuple, list)):
            found.extend(value)
        elif isinstance(value, dict):
            found.extend(value.values())
        elif isinstance(value, torch.dtype):
            if _is_code(value):
                return True
        elif isinstance(value, torch.Tensor):
            found.append(value.dtype)
            if is_traceable_wrapper_subclass(value):
                names, _ = value.__tensor_flatten__()
                found.extend(getattr(value, name) for name in names)
    return False


def _is_code(dtype: torch.dtype) -> bool:
    return dtype in _CODES or str(dtype).startswith(("torch.float8", "torch.float4"))
