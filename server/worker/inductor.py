"""Runs Inductor over one graph and returns AOTAutograd's record of the result: what an artifact is made
from.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._guards import TracingContext, tracing
from torch._inductor import standalone_compile
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses import FakeTensorMode

from fuse_cache.passes.order import Stage
from fuse_cache.passes.round_up import smaller_of
from fuse_cache.server.worker.errors import NotCacheable, translate
from fuse_cache.server.worker.rebuild import size_oblivious

# One process, one build, nobody else's caches. What is not named here keeps torch's default, whatever the
# environment says of it.
_CONFIG: Mapping[str, Any] = {
    "force_disable_caches": False,
    "fx_graph_cache": True,
    "fx_graph_remote_cache": False,
    "autotune_remote_cache": False,
    "bundled_autotune_remote_cache": False,
    "cpp_wrapper": False,
    "freezing": False,
    "max_autotune": False,
    "size_asserts": True,  # of what extern kernels return; those of inputs become the input spec
    "trace.enabled": False,
    "wrap_inductor_compiled_regions": False,
}
# Turned on by `standalone_compile` whatever the configuration says: it runs Triton kernels, to choose.
_TUNES = "triton.autotune_at_compile_time"
_FUNCTORCH_CONFIG: Mapping[str, Any] = {
    "enable_autograd_cache": True,
    "enable_remote_autograd_cache": False,
    "strict_autograd_cache": True,  # raise where torch would silently keep no record
    "bundled_autograd_cache": True,
}


def compile_graph(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    fake_mode: FakeTensorMode,
    patches: Mapping[str, Any],
) -> Any:
    """Compile `gm`, whose placeholders' own fake values are `inputs`, and return AOTAutograd's record of it.

    `patches` are of Inductor's configuration: passes, options, what the target needs.

    Raises:
        NotCacheable: torch compiles the graph but keeps no record of it.
        BuildFailed: the compiler raised.
    """
    options: dict[str, Any] = {"config_patches": {_TUNES: bool(patches.get(_TUNES, False))}}
    try:
        with _configured(patches, _FUNCTORCH_CONFIG), tracing(TracingContext(fake_mode)):
            artifact = standalone_compile(
                gm, list(inputs), dynamic_shapes="from_tracing_context", options=options, aot=True
            )
            compiled_fn: Any = getattr(artifact, "inner_fn", artifact)
            return _record(compiled_fn)
    except Exception as error:
        raise translate(error, "inductor") from error


def run_passes(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    fake_mode: FakeTensorMode,
    patches: Mapping[str, Any],
) -> None:
    """Take `gm` as far as `compile_graph` would through all passes, and generate no code.

    Raises:
        BuildFailed: a pass or the tracing before it raised.
    """
    last = Stage.LOWER.value
    stop = _StopBehind(patches.get(last))
    # A cache would answer without running a pass.
    patched = {**patches, last: stop, "force_disable_caches": True}
    functorch = {"enable_autograd_cache": False, "strict_autograd_cache": False}
    try:
        with _configured(patched, functorch), tracing(TracingContext(fake_mode)):
            standalone_compile(gm, list(inputs), dynamic_shapes="from_tracing_context", options={}, aot=True)
    except Exception as error:
        if not stop.reached:
            raise translate(error, "passes") from error


class _PassesDone(Exception):
    """Ends a compilation whose passes have run."""


class _StopBehind(CustomGraphPass):
    """Runs the last hook, if it has passes, and then ends the compilation."""

    def __init__(self, last: Any) -> None:
        self._last = last
        self.reached = False

    def __call__(self, graph: torch.fx.Graph) -> None:
        if self._last is not None:
            self._last(graph)
        self.reached = True
        raise _PassesDone

    def uuid(self) -> None:
        """Have no id: nothing of it may be cached."""

    def __deepcopy__(self, memo: object) -> _StopBehind:
        return self


def _record(compiled_fn: Any) -> Any:
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    # The table is the whole process's, and Inductor has copied from it what it needs.
    kernel_side_table.reset_table()
    entry = compiled_fn.serialize()
    if getattr(entry, "compiled_fw", None) is None or not hasattr(entry.compiled_fw.result, "source_code"):
        raise NotCacheable("the compiler's result has no form that can be carried")
    return entry


@contextlib.contextmanager
def _configured(patches: Mapping[str, Any], functorch_patches: Mapping[str, Any]) -> Iterator[None]:
    known = inductor_config.get_config_copy()
    known_functorch = functorch_config.get_config_copy()
    config = {name: value for name, value in _CONFIG.items() if name in known}
    config["compile_threads"] = max(1, len(os.sched_getaffinity(0)))
    functorch = {name: value for name, value in functorch_patches.items() if name in known_functorch}
    with (
        warnings.catch_warnings(),
        # A pool of processes that would compile Triton, and import torch for it.
        _environment("TORCH_WARM_POOL", "0"),
        inductor_config.patch({**config, **patches}),
        functorch_config.patch(functorch),
        size_oblivious(),
        _size_oblivious_views(),
        _size_oblivious_bounds(),
    ):
        # Torch's warnings about itself are for its log, whatever PYTHONWARNINGS makes of them.
        warnings.simplefilter("default")
        yield


@contextlib.contextmanager
def _size_oblivious_views() -> Iterator[None]:
    """Let Inductor's lowering of views treat a size of 1 like any other, as tracing does under
    `backed_size_oblivious`.

    `ir.View.create` asks for that with unbacked sizes only; with the client's sizes it compares example
    values instead and leaves guards like `batch != 1` behind, so that the artifact would refuse a batch of
    one. The comparison is made all the same where it finds strides and the oblivious way does not: sizes
    that are equal by a guard of the graph's own.
    """
    from torch._subclasses import fake_impls

    compute = fake_impls._compute_stride

    def has_strides(old_shape: Any, old_stride: Any, new_shape: Any) -> bool:
        """Tell what the example values say, without a guard: a heads-first layout has none."""
        old, stride, new = (
            [size.node.hint if isinstance(size, torch.SymInt) else size for size in sizes]
            for sizes in (old_shape, old_stride, new_shape)
        )
        return None in (*old, *stride, *new) or compute(old, stride, new) is not None

    def compute_stride(
        old_shape: Any, old_stride: Any, new_shape: Any, size_oblivious: bool = False
    ) -> list[Any] | None:
        strides = compute(old_shape, old_stride, new_shape, size_oblivious=True)
        if strides is None and not size_oblivious and has_strides(old_shape, old_stride, new_shape):
            return compute(old_shape, old_stride, new_shape, size_oblivious=False)
        return strides

    fake_impls._compute_stride = compute_stride
    try:
        yield
    finally:
        fake_impls._compute_stride = compute


@contextlib.contextmanager
def _size_oblivious_bounds() -> Iterator[None]:
    """Let Inductor write the smaller of two sizes as that, where it cannot be told which it is.

    It raises instead under `backed_size_oblivious`, for the end of a slice that is assigned to: of
    `padded[:rows] = x`, the rows and the rows rounded up to a multiple.
    """
    from torch._inductor.sizevars import SizeVarAllocator
    from torch.utils._sympy.functions import Max, Min

    smaller, larger = SizeVarAllocator.evaluate_min, SizeVarAllocator.evaluate_max

    def evaluate_min(self: SizeVarAllocator, left: Any, right: Any) -> Any:
        if (known := smaller_of(left, right)) is not None:
            return known
        try:
            return smaller(self, left, right)
        except TypeError:
            return Min(left, right)  # type: ignore[no-untyped-call]  # torch has no types here

    def evaluate_max(self: SizeVarAllocator, left: Any, right: Any) -> Any:
        if (known := smaller_of(left, right)) is not None:
            return right if known == left else left
        try:
            return right if smaller(self, left, right) is left else left
        except TypeError:
            return Max(left, right)  # type: ignore[no-untyped-call]  # as above

    patched: Any = SizeVarAllocator
    patched.evaluate_min, patched.evaluate_max = evaluate_min, evaluate_max
    try:
        yield
    finally:
        patched.evaluate_min, patched.evaluate_max = smaller, larger


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
