"""What the compiler asks of a GPU, for GPUs that are not here. Torch-free: a table.

Sources. Per architecture (shared memory, threads, registers): CUDA C++ Programming Guide, "Compute
Capabilities", table of technical specifications. Per product (multiprocessors, L2, memory): NVIDIA's
architecture white papers and data sheets named beside each entry. A100 80 GB and H200 were also read from
`torch.cuda.get_device_properties` on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

REGISTERS_PER_SM: Final = 65536  # 32 bits each, on every architecture from sm_70 on
THREADS_PER_BLOCK: Final = 1024
WARP: Final = 32
RESERVED_SHARED_BYTES: Final = 1 * KIB  # that the driver keeps of each block's, from sm_80 on


class UnknownGpuError(ValueError):
    """No GPU or architecture of this name is in the table. The message lists those that are."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """What all GPUs of one compute capability have in common.

    `threads` resident on a multiprocessor, `shared_kib` of it in all, of which one block may ask for all but
    the reserved part.
    """

    target: str
    major: int
    minor: int
    threads: int
    shared_kib: int


ARCHITECTURES: Final = {
    item.target: item
    for item in (
        Architecture("sm_80", 8, 0, 2048, 164),
        Architecture("sm_86", 8, 6, 1536, 100),
        Architecture("sm_89", 8, 9, 1536, 100),
        Architecture("sm_90", 9, 0, 2048, 228),
        Architecture("sm_100", 10, 0, 2048, 228),
        Architecture("sm_103", 10, 3, 2048, 228),
        Architecture("sm_120", 12, 0, 1536, 100),
    )
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One product. `name` is how it is written in `--target`, `product` what its driver calls it.

    Clocks in kHz and the bus width in bits are asked for by cost models alone.
    """

    name: str
    product: str
    architecture: Architecture
    multiprocessors: int
    l2_bytes: int
    memory_bytes: int
    clock_khz: int
    memory_clock_khz: int
    memory_bus_bits: int

    @property
    def target(self) -> str:
        """The architecture's name."""
        return self.architecture.target

    @property
    def shared_per_multiprocessor(self) -> int:
        """Bytes of shared memory of one multiprocessor."""
        return self.architecture.shared_kib * KIB

    @property
    def shared_per_block(self) -> int:
        """Bytes of shared memory that one block may ask for."""
        return self.shared_per_multiprocessor - RESERVED_SHARED_BYTES


def _gpu(
    name: str,
    product: str,
    target: str,
    multiprocessors: int,
    l2_mib: int,
    memory_gib: int,
    clocks_mhz: tuple[int, int],
    bus_bits: int,
) -> Gpu:
    clock, memory_clock = clocks_mhz
    return Gpu(
        name, product, ARCHITECTURES[target], multiprocessors, l2_mib * MIB, memory_gib * GIB,
        clock * 1000, memory_clock * 1000, bus_bits,
    )  # fmt: skip


# The first of an architecture is what its bare name means: the part that fleets have most of.
GPUS: Final = {
    gpu.name: gpu
    for gpu in (
        # A100 Tensor Core GPU Architecture, table 4
        _gpu("a100", "NVIDIA A100-SXM4-80GB", "sm_80", 108, 40, 80, (1410, 1593), 5120),
        _gpu("a100-40gb", "NVIDIA A100-SXM4-40GB", "sm_80", 108, 40, 40, (1410, 1215), 5120),
        # A30 data sheet: 56 multiprocessors, 24 GB HBM2
        _gpu("a30", "NVIDIA A30", "sm_80", 56, 24, 24, (1440, 1215), 3072),
        # GA102 white paper, and the A10 and A40 data sheets
        _gpu("a10", "NVIDIA A10", "sm_86", 72, 6, 24, (1695, 6251), 384),
        _gpu("a40", "NVIDIA A40", "sm_86", 84, 6, 48, (1740, 7251), 384),
        # Ada GPU Architecture, appendices on L4 and L40S (AD104: 48 MiB, AD102: 96 MiB of L2)
        _gpu("l40s", "NVIDIA L40S", "sm_89", 142, 96, 48, (2520, 9001), 384),
        _gpu("l4", "NVIDIA L4", "sm_89", 58, 48, 24, (2040, 6251), 192),
        # H100 Tensor Core GPU Architecture, table 3; the H200 as read from the device
        _gpu("h100", "NVIDIA H100 80GB HBM3", "sm_90", 132, 50, 80, (1980, 2619), 5120),
        _gpu("h100-pcie", "NVIDIA H100 PCIe", "sm_90", 114, 50, 80, (1755, 1593), 5120),
        _gpu("h200", "NVIDIA H200", "sm_90", 132, 60, 140, (1980, 3201), 6144),
        # Blackwell architecture brief and DGX B200 / B300 data sheets: 148 multiprocessors on two dies
        _gpu("b200", "NVIDIA B200", "sm_100", 148, 126, 180, (1965, 3996), 7680),
        _gpu("b300", "NVIDIA B300 SXM6 AC", "sm_103", 148, 126, 270, (1920, 3996), 7680),
        # RTX Blackwell PRO architecture, table on GB202
        _gpu(
            "rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", "sm_120", 188, 128, 96,
            (2430, 12481), 512,
        ),
    )
}  # fmt: skip


def find_gpu(name: str) -> Gpu:
    """Return the GPU that a target means: "h200", or "sm_90", which is the first of its architecture.

    Raises:
        UnknownGpuError: there is none of this name.
    """
    wanted = name.lower()
    found = GPUS.get(wanted) or next((gpu for gpu in GPUS.values() if gpu.target == wanted), None)
    if found is None:
        raise UnknownGpuError(
            f"{name} is no GPU of this version: use one of {', '.join((*ARCHITECTURES, *GPUS))}"
        )
    return found


def is_gpu_target(name: str) -> bool:
    """Tell whether `name` is an architecture of the table."""
    return name in ARCHITECTURES
