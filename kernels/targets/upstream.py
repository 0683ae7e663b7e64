"""Where torch and Triton ask a device that is not here, and what is answered instead.

Each `Patch` names one attribute of one release and why it has to change. `missing` tells which of them an
installed torch no longer has: a build with a patch that hits nothing would be a wrong build that nobody
notices. Where upstream has a hook of its own it is used (`shim.py`): the registered device interface,
Triton's active driver, Inductor's configuration.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from fuse_cache.proto.gpu_target import Gpu

SUPPORTED: Final = ("2.11", "2.13")  # Read and run, both; another release is refused until it is added here.


def holder_of(owner: str) -> Any:
    """Return the module "module", or the class "module:Class".

    Raises:
        AttributeError, ImportError: it moved.
    """
    module, _, inner = owner.partition(":")
    found: Any = importlib.import_module(module)
    return getattr(found, inner) if inner else found


@dataclass(frozen=True, slots=True)
class Patch:
    """One attribute, `name` of `owner` ("module" or "module:Class"), and what takes its place for a GPU."""

    owner: str
    name: str
    why: str
    make: Callable[[Gpu], Any]

    def holder(self) -> Any:
        """Return the module or class that has the attribute.

        Raises:
            AttributeError, ImportError: it moved.
        """
        return holder_of(self.owner)

    def __str__(self) -> str:
        return f"{self.owner.replace(':', '.')}.{self.name}"


def _answer(value: Any) -> Callable[..., Any]:
    def answer(*args: object, **kwargs: object) -> Any:
        return value

    return answer


def properties(gpu: Gpu) -> Any:
    """Return what `torch.cuda.get_device_properties` gives, with every field that the compiler reads."""
    from fuse_cache.kernels.targets.properties import DeviceProperties

    return DeviceProperties.of(gpu)


def _no_state(gpu: Gpu) -> Callable[..., Any]:
    import torch

    return _answer(torch.zeros(16, dtype=torch.uint8))


def _unloaded_launchers(gpu: Gpu) -> Callable[[Any], None]:
    from fuse_cache.kernels.targets.unloaded import note_registers

    return note_registers


def _folding_on_cpu(name: str) -> Callable[[Gpu], Callable[[Any], Any]]:
    def make(gpu: Gpu) -> Callable[[Any], Any]:
        from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder as Folder

        from fuse_cache.kernels.targets.on_cpu import OnCpu

        before = getattr(Folder, name)

        def fold(self: Any) -> Any:
            with OnCpu():  # type: ignore[no-untyped-call]  # as torch has it
                return before(self)

        return fold

    return make


PATCHES: Final = (
    Patch(
        "torch.cuda",
        "is_available",
        "scheduler.create_backend, TMA and tf32 choices ask it; False would mean that there is no Triton",
        lambda gpu: _answer(True),
    ),
    Patch("torch.cuda", "is_initialized", "a fake tensor on cuda would ask which device is current",
          lambda gpu: _answer(False)),
    Patch("torch.cuda", "device_count", "one device, number 0", lambda gpu: _answer(1)),
    Patch("torch.cuda", "current_device", "one device, number 0", lambda gpu: _answer(0)),
    Patch("torch.cuda", "get_device_properties", "size heuristics", lambda gpu: _answer(properties(gpu))),
    Patch("torch.cuda", "get_device_capability", "choices by generation (pad_mm, SDPA patterns, tf32)",
          lambda gpu: _answer((gpu.architecture.major, gpu.architecture.minor))),
    Patch("torch.cuda", "get_device_name", "part of Inductor's own keys", lambda gpu: _answer(gpu.product)),
    Patch("torch.cuda", "is_bf16_supported", "bf16 is native from sm_80 on",
          lambda gpu: _answer(gpu.architecture.major >= 8)),
    Patch("torch.cuda", "is_tf32_supported", "tf32 is native from sm_80 on",
          lambda gpu: _answer(gpu.architecture.major >= 8)),
    Patch("torch.cuda", "synchronize", "nothing runs", lambda gpu: _answer(None)),
    Patch("torch.cuda", "get_rng_state", "_dynamo.utils.preserve_rng_state saves it", _no_state),
    Patch("torch.cuda", "set_rng_state", "_dynamo.utils.preserve_rng_state restores it",
          lambda gpu: _answer(None)),
    Patch("torch.accelerator", "is_available", "Dynamo asks for streams of it while it traces",
          lambda gpu: _answer(False)),
    Patch("torch._subclasses.fake_tensor", "init_gpu_context", "makes a tensor on the device",
          lambda gpu: _answer(None)),
    Patch("torch._subclasses.fake_tensor:FakeTensorMode", "avoid_device_init",
          "upstream's switch for fake tensors of absent devices; is_available above turns it off",
          lambda gpu: property(_answer(True))),
    Patch("torch._inductor.compile_fx", "get_cuda_device_context", "enters the device",
          lambda gpu: _answer(contextlib.nullcontext())),
    Patch("torch._inductor.runtime.triton_helpers", "set_driver_to_gpu",
          "would replace the driver that states the target", lambda gpu: _answer(None)),
    Patch("torch._inductor.runtime.triton_heuristics:CachingAutotuner", "_make_launchers",
          "loads kernels; their registers are read from the cubins instead", _unloaded_launchers),
    Patch("torch._inductor.fx_passes.joint_graph:UniformValueConstantFolder", "run",
          "runs operators of one element for real", _folding_on_cpu("run")),
    Patch("torch._inductor.fx_passes.joint_graph:UniformValueConstantFolder", "_add_peephole_patterns",
          "runs operators of one element for real", _folding_on_cpu("_add_peephole_patterns")),
)  # fmt: skip

# Answers about the device that torch remembers for the life of a process: (module[:class], name). Forgotten
# before and after; one that a release does not have has nothing to forget.
REMEMBERED: Final = (
    ("torch._inductor.runtime.hints:DeviceProperties", "create"),
    ("torch._inductor.codecache:CacheBase", "get_system"),
    ("torch._inductor.codecache:CacheBase", "get_local_cache_path"),
    ("torch._inductor.utils", "get_gpu_type"),
    ("torch._inductor.utils", "get_gpu_shared_memory"),
    ("torch._inductor.utils", "is_big_gpu"),
    ("torch._inductor.utils", "get_max_num_sms"),
    ("torch.utils._triton", "_device_supports_tma"),
    ("torch.utils._triton", "has_triton"),
    ("torch.utils._triton", "triton_backend"),
    ("torch.utils._triton", "triton_hash_with_backend"),
    ("torch.utils._triton", "has_triton_tma_device"),
    ("torch.utils._triton", "has_triton_experimental_host_tma"),
    ("torch.utils._triton", "has_triton_tensor_descriptor_host_tma"),
    ("torch.utils._triton", "has_triton_tma"),
    ("torch.utils._triton", "has_triton_stable_tma_api"),
)


def missing() -> list[str]:
    """Return what stands in the way of a right build with the torch installed here; empty: nothing."""
    import torch

    release = ".".join(torch.__version__.split(".")[:2])
    if release not in SUPPORTED:
        return [f"torch {release}: read and tried are {' and '.join(SUPPORTED)}"]
    lost = []
    for patch in PATCHES:
        try:
            getattr(patch.holder(), patch.name)
        except (AttributeError, ImportError):
            lost.append(str(patch))
    return lost
