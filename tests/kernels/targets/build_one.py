"""Compiles one small graph for a GPU that is not here, in a process of its own; prints what came of it.

`python build_one.py GPU GUARD_FOLDER`; the last line is JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._inductor import standalone_compile
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fuse_cache.kernels.targets.cpu_wheel import is_cpu_wheel, register_guard
from fuse_cache.kernels.targets.cubin import architecture_of, registers_of
from fuse_cache.kernels.targets.shim import compiling_for
from fuse_cache.proto.gpu_target import Gpu, find_gpu

AOT: dict[str, Any] = {
    "bundled_autograd_cache": True,
    "enable_autograd_cache": True,
    "strict_autograd_cache": True,
}


def norm_and_gate(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """A reduction over rows, and a view of its result."""
    summed = x + residual
    wide = summed.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return torch.nn.functional.silu(normed.to(x.dtype) * weight)[:, 1024:], summed


def compile_graph(gpu: Gpu) -> Any:
    """Return AOTAutograd's record of the graph, compiled for `gpu`."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with compiling_for(gpu), torch.no_grad():
        with mode:
            x, residual = (torch.empty(16, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            inputs: list[Any] = [x, torch.empty(4096, device="cuda", dtype=torch.bfloat16), residual]
            gm = make_fx(norm_and_gate)(*inputs)
        for node in gm.graph.nodes:
            node.type = None  # An annotation kept as text, which torch's key cannot take.
            node.meta["example_value"] = node.meta.get("val")
        inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        with tracing(TracingContext(mode)), functorch_config.patch(**AOT):
            # Upstream turns autotuning at compile time on here, whatever the configuration says.
            options = {"config_patches": {"triton.autotune_at_compile_time": False}}
            made = standalone_compile(
                gm, inputs, dynamic_shapes="from_tracing_context", options=options, aot=True
            )
            compiled: Any = getattr(made, "inner_fn", made)
            return compiled.serialize()


def main(name: str, guard: str) -> None:
    """Compile, and print the wrapper and every cubin's facts."""
    gpu = find_gpu(name)
    if is_cpu_wheel():
        register_guard(Path(guard))
    result = compile_graph(gpu).compiled_fw.result
    bundle = result._triton_bundle
    cubins = [
        artifact.payload
        for kernel in bundle.kernel_artifacts
        for artifact in kernel.artifacts
        if artifact.filename.endswith(".cubin")
    ]
    digests = sorted(hashlib.sha256(cubin).hexdigest() for cubin in cubins)
    outcome = {
        "source": result.source_code,
        "cubins": digests,
        "registers": [registers_of(cubin) for cubin in cubins],
        "architectures": sorted({architecture_of(cubin) for cubin in cubins}),
        "static": [kernel.kernel_name for kernel in bundle.static_autotuners or ()],
    }
    print(json.dumps(outcome))


if __name__ == "__main__":
    main(*sys.argv[1:])
