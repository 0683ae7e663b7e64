"""A GPU's facts under the names that torch gives them."""

from __future__ import annotations

from dataclasses import dataclass

from fuse_cache.proto.gpu_target import REGISTERS_PER_SM, THREADS_PER_BLOCK, WARP, Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProperties:
    """Stands for `torch._C._CudaDeviceProperties`, which cannot be made without a device. Bytes and kHz."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    L2_cache_size: int
    shared_memory_per_block: int = 48 << 10
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    regs_per_multiprocessor: int = REGISTERS_PER_SM
    max_threads_per_multi_processor: int
    max_threads_per_block: int = THREADS_PER_BLOCK
    warp_size: int = WARP
    clock_rate: int
    memory_clock_rate: int
    memory_bus_width: int
    gcnArchName: str  # On NVIDIA's the product's name. A build without CUDA takes it for its caches' key.
    is_integrated: int = 0
    is_multi_gpu_board: int = 0

    @classmethod
    def of(cls, gpu: Gpu) -> DeviceProperties:
        """Return the properties of a GPU of the table."""
        return cls(
            name=gpu.product,
            major=gpu.architecture.major,
            minor=gpu.architecture.minor,
            multi_processor_count=gpu.multiprocessors,
            total_memory=gpu.memory_bytes,
            L2_cache_size=gpu.l2_bytes,
            shared_memory_per_block_optin=gpu.shared_per_block,
            shared_memory_per_multiprocessor=gpu.shared_per_multiprocessor,
            max_threads_per_multi_processor=gpu.architecture.threads,
            clock_rate=gpu.clock_khz,
            memory_clock_rate=gpu.memory_clock_khz,
            memory_bus_width=gpu.memory_bus_bits,
            gcnArchName=gpu.product,
        )
