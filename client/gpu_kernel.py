"""Launches an artifact's GPU kernels from their machine code. Nothing is compiled, no Triton is imported.

A kernel is loaded at its first launch, on the device that the artifact was loaded for. Where the builder
left several variants, that launch measures them once; the arguments that a kernel writes are copied for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import torch

from fuse_cache.client.forklock import ForkLock
from fuse_cache.client.memory_file import as_file
from fuse_cache.proto.gpu_kernel import GpuKernel, GpuKernelError, Variant, decode_kernel
from fuse_cache.proto.revision import chosen_variant, tuned_choices

# From the arguments of a call to the grid and the arguments of the launch.
Launcher: TypeAlias = Callable[..., tuple[int, int, int, tuple[Any, ...]]]
_Launch: TypeAlias = Callable[..., None]

_WARM_UPS: Final = 3
_ROUNDS: Final = 10
_SPILLED: Final = 16  # Registers spilled beyond which Inductor does not try a variant of its own.


class GpuLoadError(RuntimeError):
    """A kernel cannot be loaded on this device."""


class LoadedKernel:
    """What the wrapper calls a kernel: `run(*arguments, stream=...)`. Safe for concurrent use."""

    def __init__(
        self,
        name: str,
        kernel: GpuKernel,
        launchers: Sequence[Launcher],
        cubins: Mapping[str, bytes],
        device: int,
    ) -> None:
        self._name = name
        self._kernel = kernel
        self._launchers = launchers
        self._cubins = cubins
        self._device = device
        self._lock = ForkLock()  # Guards the first launch.
        self._chosen: _Launch | None = None
        self.config = ""  # of the variant that was chosen
        self.measured = ""  # its machine code, where variants were measured

    @property
    def variants(self) -> int:
        """How many there are to choose from."""
        return len(self._kernel.variants)

    def run(self, *args: Any, stream: int, **kwargs: Any) -> None:
        """Launch on `stream`.

        Raises:
            GpuLoadError: the first launch, and it cannot be loaded.
        """
        launch = self._chosen
        if launch is None:
            launch = self._choose(args, kwargs, stream)
        launch(*args, stream=stream, **kwargs)

    def _choose(self, args: tuple[Any, ...], kwargs: dict[str, Any], stream: int) -> _Launch:
        with self._lock:
            if self._chosen is None:
                loaded = [
                    (variant, *self._load(variant, launcher))
                    for variant, launcher in zip(self._kernel.variants, self._launchers, strict=True)
                ]
                fitting = [(variant, launch) for variant, launch, spills in loaded if spills <= _SPILLED]
                candidates = fitting or [(variant, launch) for variant, launch, _ in loaded]
                # While a CUDA graph is captured nothing can be measured: then it is the builder's first.
                if len(loaded) > 1 and not torch.cuda.is_current_stream_capturing():
                    if len(candidates) > 1:
                        candidates.sort(key=lambda item: self._milliseconds(item[1], args, kwargs, stream))
                    self.measured = candidates[0][0].cubin
                self.config, self._chosen = candidates[0][0].config, candidates[0][1]
            return self._chosen

    def _load(self, variant: Variant, launcher: Launcher) -> tuple[_Launch, int]:
        """Return what launches a variant, and how many registers it spills."""
        static: Any = static_launcher()
        try:
            with as_file(self._cubins[variant.cubin]) as path:
                *_, function, _, spills = static._load_kernel(
                    path, self._kernel.entry, variant.shared, self._device
                )
        except (RuntimeError, OSError) as error:
            raise GpuLoadError(f"kernel {self._name} cannot be loaded on this device: {error}") from error
        nothing = (None,) * variant.scratch
        launch_kernel = static._launch_kernel
        warps, shared, types = variant.warps, variant.shared, variant.types

        def launch(*args: Any, stream: int, **kwargs: Any) -> None:
            x, y, z, passed = launcher(*args, **kwargs)
            launch_kernel(function, x, y, z, warps, shared, types, (*passed, *nothing), stream)

        return launch, int(spills)

    def _milliseconds(
        self, launch: _Launch, args: tuple[Any, ...], kwargs: dict[str, Any], stream: int
    ) -> float:
        """Return how long one launch takes, the best of some."""
        names = launcher_arguments(self._launchers[0])
        written = set(self._kernel.mutated)
        copies = [
            _clone(value) if name in written and isinstance(value, torch.Tensor) else value
            for name, value in zip(names, args, strict=False)
        ]
        zeroed = [copies[names.index(name)] for name in self._kernel.zeroed if name in names]
        best = float("inf")
        for round_ in range(_WARM_UPS + _ROUNDS):
            for tensor in zeroed:
                tensor.zero_()
            began, ended = _event(), _event()
            began.record()
            launch(*copies, stream=stream, **kwargs)
            ended.record()
            ended.synchronize()
            if round_ >= _WARM_UPS:
                best = min(best, began.elapsed_time(ended))
        return best


def launcher_arguments(launcher: Launcher) -> tuple[str, ...]:
    """Return the names of the arguments that a launcher takes, in order."""
    code: Any = getattr(launcher, "__code__")  # noqa: B009  # a function of the wrapper has one
    return tuple(code.co_varnames[: code.co_argcount])


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the same strides, gaps included: a kernel computes addresses from those it was built
    with, and `Tensor.clone` makes a dense copy of a slice.
    """
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((reach if tensor.numel() else 0,), (1,)).clone()
    return flat.as_strided(tensor.shape, tensor.stride())


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # as torch has it


class GpuKernels:
    """The kernels of one artifact, for the device that is current now."""

    def __init__(self, sections: Mapping[str, bytes]) -> None:
        self._sections = sections
        self._tuned = tuned_choices(sections)
        self._device = int(torch.cuda.current_device())
        self._loaded: dict[str, LoadedKernel] = {}

    def namespace(self) -> dict[str, Any]:
        """Return what the artifact's wrapper calls: its kernels, the current device's number."""
        stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream")  # noqa: B009  # CUDA builds have it
        return {"gpu_kernel": self._define, "get_raw_stream": stream, "device_index": self._device}

    def choices(self) -> dict[str, str]:
        """Return kernel -> machine code of the variants that won here; empty until all have been measured."""
        several = {name: kernel for name, kernel in self._loaded.items() if kernel.variants > 1}
        found = {name: kernel.measured for name, kernel in several.items()}
        return found if all(found.values()) else {}

    def _define(self, name: str, launchers: Sequence[Launcher]) -> LoadedKernel:
        kernel = decode_kernel(self._sections[f"gpu/{name}"])
        if len(launchers) != len(kernel.variants):
            raise GpuKernelError(
                f"kernel {name} has {len(kernel.variants)} variants and {len(launchers)} launchers"
            )
        if name in self._tuned:
            number = chosen_variant(kernel, self._tuned[name])
            kernel = msgspec.structs.replace(kernel, variants=(kernel.variants[number],))
            launchers = (launchers[number],)
        cubins = {variant.cubin: self._sections[f"cubin/{variant.cubin}"] for variant in kernel.variants}
        self._loaded[name] = LoadedKernel(name, kernel, launchers, cubins, self._device)
        return self._loaded[name]


def absent_namespace(asked: Callable[[str], object]) -> dict[str, Any]:
    """Return a namespace in which a wrapper can be defined and not called, where there is no device. `asked`
    is told the name of each kernel that it defines.
    """

    def gpu_kernel(name: str, launchers: Sequence[Launcher]) -> None:
        asked(name)

    return {"gpu_kernel": gpu_kernel, "get_raw_stream": None, "device_index": 0}


def static_launcher() -> Any:
    """Return torch's launcher of kernels from machine code.

    Raises:
        GpuLoadError: this torch was built without CUDA.
    """
    found: Any = getattr(torch._C, "_StaticCudaLauncher", None)
    if found is None:
        raise GpuLoadError(f"torch {torch.__version__} was built without CUDA")
    return found


def why_not_here(target: str) -> str | None:
    """Return why this host's device cannot run code for `target`, or None."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return f"{target} needs a GPU, and torch sees none here"
    major, minor = torch.cuda.get_device_capability()
    have = f"sm_{major}{minor}"
    return None if have == target else f"built for {target}, and this device is {have}"
