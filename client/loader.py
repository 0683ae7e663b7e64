"""Turns an artifact's content into a callable. What it reads was signed by a builder that this host trusts;
the caller has verified that.

Nothing in torch is patched, no file is written and no compiler is run: Inductor's wrapper is executed from
memory, its kernels are mapped from memory, and AOTAutograd's own record puts its runtime wrappers around
them.
"""

from __future__ import annotations

import hashlib
import importlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fuse_cache.client.checker import InputChecker
from fuse_cache.client.gpu_kernel import GpuKernels, absent_namespace, why_not_here
from fuse_cache.client.native import EXTERN_KERNELS, NativeLoadError, kernel
from fuse_cache.proto import artifact_pb2, cpu_target, safe_pickle
from fuse_cache.proto.container import unpack
from fuse_cache.proto.errors import ContainerError
from fuse_cache.proto.gpu_kernel import GpuKernelError
from fuse_cache.proto.graph import Graph, Input, SymMeta, TensorMeta
from fuse_cache.proto.revision import RevisionError
from fuse_cache.proto.spec import ArtifactSpec, SpecError, decode_spec


class ArtifactLoadError(Exception):
    """The content cannot become a callable on this host. The caller compiles locally, reports it, and does
    not try again.

    `reason` is for people, and for `GraphReport.reason`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class LoadedArtifact:
    """A compiled graph. Call it with the graph's inputs in order; it returns the outputs as a tuple. Safe
    for concurrent use.
    """

    def __init__(
        self,
        spec: ArtifactSpec,
        check: InputChecker,
        run: Callable[[list[Any]], Sequence[Any]],
        kernels: GpuKernels | None = None,
    ) -> None:
        self.spec = spec
        self._kernels = kernels
        self._check = check
        self._run = run

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """Check the inputs and run.

        Raises:
            InputMismatchError: an input is not what the artifact was built for; nothing was launched.
        """
        self._check(args)
        return tuple(self._run(list(args)))

    def choices(self) -> dict[str, str]:
        """Return which variant of each GPU kernel won on this host, by its machine code's name; empty where
        there was none to choose, or not all have been launched.
        """
        return {} if self._kernels is None else self._kernels.choices()

    def check(self, args: Sequence[Any]) -> None:
        """Check inputs without running, with the errors of a call."""
        self._check(args)


def warm_up() -> None:
    """Import what the first load of a process needs, 1 to 2 s of it: to be called where there is time to
    wait anyway.
    """
    importlib.import_module("torch._functorch._aot_autograd.aot_autograd_result")


def load(
    content: bytes,
    manifest: artifact_pb2.Manifest | None = None,
    *,
    graph: Graph | None = None,
    names: Sequence[str] = (),
    elsewhere: Callable[[str], object] | None = None,
) -> LoadedArtifact:
    """Return the callable in `content`.

    `manifest` (verified) and `graph` (what the host captured) must agree with what the content says of
    itself, where they are given. `names` are the inputs' names, for messages. `elsewhere` loads what is for
    another machine, as far as that goes without a device: it is told each GPU kernel's name, and what it
    gives back cannot be called.

    Raises:
        ArtifactLoadError: this host cannot use it.
    """
    try:
        sections = unpack(content)
        spec = decode_spec(sections["spec"])
        wrapper = sections["wrapper"].decode()
        record = sections["aot"]
    except (ContainerError, SpecError, UnicodeDecodeError) as error:
        raise ArtifactLoadError(f"the content is damaged: {error}") from error
    except KeyError as error:
        raise ArtifactLoadError(f"the content has no section {error}") from error
    if elsewhere is None:
        _check_host(spec)
    _check_agreement(spec, manifest, graph)
    try:
        check = InputChecker(spec, names)
    except ValueError as error:
        raise ArtifactLoadError(str(error)) from error
    kernels = None
    try:
        if not cpu_target.is_cpu_target(spec.target) and elsewhere is None:
            kernels = GpuKernels(sections)
    except RevisionError as error:
        raise ArtifactLoadError(f"the content is damaged: {error}") from error
    call = _execute(wrapper, sections, spec, kernels, elsewhere)
    return LoadedArtifact(spec, check, _with_aot(record, call), kernels)


def _check_host(spec: ArtifactSpec) -> None:
    if cpu_target.is_cpu_target(spec.target):
        refusal = cpu_target.refusal(spec.target)
    else:
        refusal = why_not_here(spec.target)
    if refusal is not None:
        raise ArtifactLoadError(refusal)
    release = str(torch.__version__).partition("+")[0]
    if spec.torch != release:
        raise ArtifactLoadError(f"built with torch {spec.torch}, this host has {release}")


def _check_agreement(spec: ArtifactSpec, manifest: artifact_pb2.Manifest | None, graph: Graph | None) -> None:
    if manifest is not None:
        if manifest.target != spec.target:
            raise ArtifactLoadError(f"the manifest says {manifest.target}, the content {spec.target}")
        _check_range(spec, manifest.range)
    if graph is not None:
        if len(graph.inputs) != len(spec.inputs):
            raise ArtifactLoadError(
                f"the graph has {len(graph.inputs)} inputs, the artifact {len(spec.inputs)}"
            )
        for index, (have, want) in enumerate(zip(graph.inputs, spec.inputs, strict=True)):
            if _form(have) != _form(want):
                raise ArtifactLoadError(f"input {index} of the graph is not what the artifact was built for")


def _check_range(spec: ArtifactSpec, wanted: artifact_pb2.CompileRange) -> None:
    if not wanted.symbol_plus_one:
        return
    number = wanted.symbol_plus_one - 1
    if number >= len(spec.symbols):
        raise ArtifactLoadError(
            f"the manifest's range is about symbol {number}, the content has {len(spec.symbols)}"
        )
    built = spec.symbols[number]
    # Less than the range is fine: the graph's own bounds cut it.
    if built.upper is None or built.lower < wanted.lower or built.upper > wanted.upper:
        raise ArtifactLoadError("the manifest and the content name different ranges")


def _form(item: Input) -> object:
    meta = item.meta
    if isinstance(meta, TensorMeta):
        return meta.dtype, meta.device, meta.size, meta.stride
    assert isinstance(meta, SymMeta)
    return meta.value


def _execute(
    wrapper: str,
    sections: Mapping[str, bytes],
    spec: ArtifactSpec,
    kernels: GpuKernels | None,
    elsewhere: Callable[[str], object] | None,
) -> Callable[[list[Any]], Any]:
    """Execute Inductor's wrapper and return its `call`, which takes a list and empties it."""
    name = f"fuse_cache_artifact_{hashlib.sha256(wrapper.encode()).hexdigest()[:16]}"

    def native_kernel(digest: str) -> Callable[..., None]:
        return kernel(digest, sections[f"so/{digest}"])

    namespace: dict[str, Any] = {
        "__name__": name,
        "native_kernel": native_kernel,
        "extern_kernels": EXTERN_KERNELS,
    }
    if kernels is not None:
        namespace |= kernels.namespace()
    elif elsewhere is not None:
        namespace |= absent_namespace(elsewhere)
    try:
        exec(compile(wrapper, f"<{name}>", "exec"), namespace)
        for constant in spec.constants:
            data = bytearray(sections[f"constant/{constant.name}"])
            dtype = getattr(torch, constant.dtype)
            # An empty buffer is refused by frombuffer.
            flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            namespace[constant.name] = flat.reshape(constant.size)
        call: Callable[[list[Any]], Any] = namespace["call"]
    except (NativeLoadError, GpuKernelError, RevisionError) as error:
        raise ArtifactLoadError(str(error)) from error
    except Exception as error:
        raise ArtifactLoadError(f"the wrapper does not run here: {type(error).__name__}: {error}") from error
    if not spec.aligned_inputs:
        return call
    from torch._inductor.utils import align_inputs_from_check_idxs
    from torch.utils._ordered_set import OrderedSet

    aligned: Callable[[list[Any]], Any] = align_inputs_from_check_idxs(
        call, spec.aligned_inputs, OrderedSet(spec.mutated_inputs)
    )
    return aligned


class _Forward:
    """What AOTAutograd's record asks for its compiled graph: it stands where torch's own would load from a
    cache folder.
    """

    def __init__(self, call: Callable[[list[Any]], Any]) -> None:
        def boxed(args: list[Any]) -> Any:
            return call(args)

        # torch's mark for "takes a list and empties it"
        boxed._boxed_call = True  # type: ignore[attr-defined]
        self._call = boxed

    def load(self, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        return self._call

    def post_compile(
        self, result: Callable[[list[Any]], Any], fx_config: object
    ) -> Callable[[list[Any]], Any]:
        return result


def _with_aot(record: bytes, call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Sequence[Any]]:
    from torch._guards import TracingContext, tracing
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    try:
        entry: Any = safe_pickle.loads(record)
        entry.compiled_fw = _Forward(call)
        with tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv()))):
            run: Callable[[list[Any]], Sequence[Any]] = entry.wrap_post_compile(
                [], entry.sanitized_aot_config, {}
            )
    except (
        pickle.UnpicklingError,
        EOFError,
        AttributeError,
        ImportError,
        TypeError,
        KeyError,
        AssertionError,
    ) as error:
        raise ArtifactLoadError(
            f"AOTAutograd's record does not fit this torch: {type(error).__name__}: {error}"
        ) from error
    return run
