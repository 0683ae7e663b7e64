"""Joint graphs without Dynamo and AOTAutograd: some twenty times faster, and node for node the same.

`test_tracing.py` holds the two against each other for one spelling in six.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext


def trace(
    function: Callable[..., Any], *args: Tensor, dynamic_rows: bool = False, device: str = "cpu"
) -> fx.GraphModule:
    """Return the graph that Inductor's joint hook sees of a function, for inference.

    `dynamic_rows` makes the first size symbolic, of every argument that has it in common with the first.
    `device` is where the fake tensors are: "meta" stands for a GPU that is not here.
    """
    rows = args[0].shape[0]
    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)

    def fake(value: Tensor) -> Tensor:
        kinds = [DimDynamic.STATIC] * value.dim()
        if dynamic_rows and value.dim() > 1 and value.shape[0] == rows:
            kinds[0] = DimDynamic.DUCK
        return mode.from_tensor(
            value.to(device), symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds)
        )

    def flat(*inner: Tensor) -> Any:
        result = function(*inner)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    with torch.no_grad(), enable_python_dispatcher():
        functional = dispatch_functionalize(flat, FunctionalTensorMode())
        fakes = [fake(value) for value in args]
        with mode:  # For tensors of symbolic size that are made from nothing.
            gm = make_fx(functional, select_decomp_table())(*fakes)
    gm.graph.eliminate_dead_code()
    gm.meta["shape_env"] = shape_env
    return gm


def run(gm: fx.GraphModule, *args: Tensor) -> list[Any]:
    """Run a traced graph eagerly on real tensors."""
    with torch.no_grad():
        return list(gm(*args))
