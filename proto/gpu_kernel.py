"""A GPU kernel as an artifact carries it: what launching its machine code takes, as plain data."""

from __future__ import annotations

from typing import Final

import msgspec

MAX_VARIANTS: Final = 64
TYPES: Final = frozenset("ObhilfdBHIK")  # of an argument: a pointer, or a number of this width


class GpuKernelError(ValueError):
    """The bytes are not a description of a kernel."""


class Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One configuration of a kernel. `shared` in bytes for each block, `warps` of 32 threads.

    `types` has a letter for each argument of the launch, the last `scratch` of which are null.
    """

    cubin: str  # name of its section, without "cubin/"
    shared: int
    warps: int
    types: str
    scratch: int
    config: str  # for people


class GpuKernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kernel and its variants, of which a host's first launch chooses.

    `entry` is the function in each cubin. Arguments named in `mutated` are written, those in `zeroed` must
    be zero before each launch.
    """

    entry: str
    variants: tuple[Variant, ...]
    mutated: tuple[str, ...] = ()
    zeroed: tuple[str, ...] = ()


def encode_kernel(kernel: GpuKernel) -> bytes:
    """Return the bytes of `kernel`: JSON with the fields in the order of the class."""
    return msgspec.json.encode(kernel, order="deterministic")


def decode_kernel(data: bytes) -> GpuKernel:
    """Return the kernel in `data`.

    Raises:
        GpuKernelError: it is no description that can be launched.
    """
    try:
        kernel = msgspec.json.decode(data, type=GpuKernel)
    except msgspec.DecodeError as error:
        raise GpuKernelError(f"a kernel's description: {error}") from error
    if not 0 < len(kernel.variants) <= MAX_VARIANTS:
        raise GpuKernelError(f"a kernel with {len(kernel.variants)} variants")
    for variant in kernel.variants:
        if not set(variant.types) <= TYPES or not 0 <= variant.scratch <= len(variant.types):
            raise GpuKernelError(f"kernel {kernel.entry} has arguments of types {variant.types!r}")
        if not 0 < variant.warps <= 32 or not 0 <= variant.shared < 1 << 20:
            raise GpuKernelError(f"kernel {kernel.entry} cannot be launched with {variant}")
    return kernel
