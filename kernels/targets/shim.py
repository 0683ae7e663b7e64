"""Compiles for a GPU that is not here. For worker processes and `warm`'s tracing, never in a serving host.

`with compiling_for(gpu):` makes Inductor and Triton believe in one device of that kind. Nothing in it
reaches a driver: kernels are compiled and never loaded, and no benchmark is tried.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from fuse_cache.kernels.targets import upstream
from fuse_cache.kernels.targets.launchable import LAUNCHABLE, known_config
from fuse_cache.proto.gpu_target import REGISTERS_PER_SM, WARP, Gpu

_CONFIG: Final[dict[str, object]] = {
    # Would run kernels: the host's first launch chooses among the variants that are compiled here.
    "triton.autotune_at_compile_time": False,
    "max_autotune": False,
    "coordinate_descent_tuning": False,
    "shape_padding": False,  # It measures whether padding pays.
    **LAUNCHABLE,
}


class UnsupportedTorchError(RuntimeError):
    """This torch is not one that the shim knows. The message names what it lacks."""


def check_torch() -> None:
    """Make sure that everything the shim changes is where it was.

    Raises:
        UnsupportedTorchError: something moved: a build would go on with half of the answers and be wrong.
    """
    lost = upstream.missing()
    if lost:
        raise UnsupportedTorchError(
            f"torch {torch.__version__} cannot compile for an absent GPU: {', '.join(lost)} "
            f"not found; use torch {' or '.join(upstream.SUPPORTED)}, or a machine with the GPU"
        )


@contextlib.contextmanager
def compiling_for(gpu: Gpu) -> Iterator[None]:
    """Let this process compile for `gpu` while the context lasts.

    Raises:
        UnsupportedTorchError
    """
    import torch._inductor.config as inductor_config

    check_torch()
    with contextlib.ExitStack() as stack:
        for patch in upstream.PATCHES:
            _put(stack, patch.holder(), patch.name, patch.make(gpu))
        _use_interface(stack, gpu)
        _use_driver(stack, gpu)
        _forget()
        stack.callback(_forget)
        stack.enter_context(inductor_config.patch(known_config(_CONFIG)))
        yield


def _put(stack: contextlib.ExitStack, holder: Any, name: str, value: object) -> None:
    own = vars(holder)
    if name in own:  # As it stands there: a static method or property is more than what it gives.
        stack.callback(setattr, holder, name, own[name])
    else:
        stack.callback(delattr, holder, name)
    setattr(holder, name, value)


def _use_interface(stack: contextlib.ExitStack, gpu: Gpu) -> None:
    """Register a device interface for "cuda" that answers from the table. Upstream's own hook."""
    from torch._dynamo import device_interface

    device_interface.get_interface_for_device("cuda")  # Fills the registry, once.
    facts = upstream.properties(gpu)

    class Worker:
        @staticmethod
        def set_device(device: int) -> None:
            pass

        @staticmethod
        def current_device() -> int:
            return 0

        @staticmethod
        def get_device_properties(device: object = None) -> Any:
            return facts

    answers: dict[str, Any] = {
        "Worker": Worker,
        "current_device": 0,
        "set_device": None,
        "device_count": 1,
        "synchronize": None,
        "get_device_properties": facts,
        "exchange_device": 0,
        "maybe_exchange_device": 0,
        "get_raw_stream": 0,
        "is_available": True,
        "is_bf16_supported": True,
    }
    members = {
        name: value if name == "Worker" else staticmethod(_returning(value))
        for name, value in answers.items()
    }
    absent = type("AbsentCudaInterface", (device_interface.CudaInterface,), members)
    registry = device_interface.device_interfaces
    before = registry["cuda"]
    device_interface.register_interface_for_device("cuda", absent)
    stack.callback(registry.__setitem__, "cuda", before)


def _returning(value: object) -> Callable[..., object]:
    return lambda *args, **kwargs: value


def _use_driver(stack: contextlib.ExitStack, gpu: Gpu) -> None:
    """Make a driver active that knows nothing but its target. Triton's own hook."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    capability = 10 * gpu.architecture.major + gpu.architecture.minor

    class Utils:
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {
                "max_shared_mem": gpu.shared_per_block,
                "multiprocessor_count": gpu.multiprocessors,
                "max_num_regs": REGISTERS_PER_SM,
                "warpSize": WARP,
                "sm_clock_rate": gpu.clock_khz,
                "mem_clock_rate": gpu.memory_clock_khz,
                "mem_bus_width": gpu.memory_bus_bits,
            }

    class AbsentDriver:
        utils = Utils()

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, WARP)

        def get_current_device(self) -> int:
            return 0

        def set_current_device(self, device: int) -> None:
            pass

        def get_current_stream(self, device: int = 0) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def get_device_interface(self) -> Any:
            return torch.cuda

        def get_device_capability(self, device: int = 0) -> tuple[int, int]:
            return gpu.architecture.major, gpu.architecture.minor

        def map_python_to_cpp_type(self, kind: str) -> str:
            raise RuntimeError(f"a launcher for {kind} would have to be compiled by the host")

    before = driver._active
    driver.set_active(AbsentDriver())
    stack.callback(setattr, driver, "_active", before)


def _forget() -> None:
    for owner, name in upstream.REMEMBERED:
        with contextlib.suppress(AttributeError, ImportError):
            held = getattr(upstream.holder_of(owner), name)
            getattr(held, "__func__", held).cache_clear()
