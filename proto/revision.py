"""Tuned builds: an artifact from which the kernel variants that were slower on a host have been left out.

A first build for a GPU that was not there carries every variant, and each host measures them at its first
call. What one host has found out becomes revision 1 of the artifact, under a key of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from blake3 import blake3

from fuse_cache.proto.container import pack, unpack
from fuse_cache.proto.errors import ContainerError
from fuse_cache.proto.gpu_kernel import GpuKernel, GpuKernelError, decode_kernel

TUNED_REVISION: Final = 1
_SECTION: Final = "tuned"
_CONTEXT: Final = "fuse-cache 2026 revised key v1"
_KERNEL: Final = "gpu/"
_CUBIN: Final = "cubin/"


class RevisionError(ValueError):
    """The choices do not fit the content."""


def revised_key(key: bytes, revision: int = TUNED_REVISION) -> bytes:
    """Return the key, 32 bytes, of a later revision of what is stored under `key`."""
    return blake3(key + revision.to_bytes(4, "little"), derive_key_context=_CONTEXT).digest()


def tuned_content(content: bytes, choices: Mapping[str, str]) -> bytes:
    """Return `content` with one variant of each kernel in `choices` (kernel -> cubin) and all of the others.

    Raises:
        RevisionError: it is no content, or a choice is not among a kernel's variants; nothing is chosen.
    """
    if not choices:
        raise RevisionError("nothing was chosen")
    try:
        sections = unpack(content)
        kernels = {
            name.removeprefix(_KERNEL): decode_kernel(data)
            for name, data in sections.items()
            if name.startswith(_KERNEL)
        }
    except (ContainerError, GpuKernelError) as error:
        raise RevisionError(f"not a GPU artifact: {error}") from error
    if _SECTION in sections:
        raise RevisionError("it is tuned already")
    for name, cubin in choices.items():
        kernel = kernels.get(name)
        if kernel is None or cubin not in {variant.cubin for variant in kernel.variants}:
            raise RevisionError(f"kernel {name[:80]!r} has no variant {cubin[:40]!r}")
    wanted = {
        choices.get(name, variant.cubin) for name, kernel in kernels.items() for variant in kernel.variants
    }
    kept = {
        name: data
        for name, data in sections.items()
        if not name.startswith(_CUBIN) or name.removeprefix(_CUBIN) in wanted
    }
    return pack({**kept, _SECTION: msgspec.json.encode(dict(sorted(choices.items())))})


def tuned_choices(sections: Mapping[str, bytes]) -> dict[str, str]:
    """Return kernel -> cubin of what a content was tuned to; empty for a first build.

    Raises:
        RevisionError: the section is malformed.
    """
    data = sections.get(_SECTION)
    if data is None:
        return {}
    try:
        return msgspec.json.decode(data, type=dict[str, str])
    except msgspec.DecodeError as error:
        raise RevisionError(f"the choices of a tuned build: {error}") from error


def chosen_variant(kernel: GpuKernel, cubin: str) -> int:
    """Return the number of the variant with this machine code.

    Raises:
        RevisionError: there is none.
    """
    for number, variant in enumerate(kernel.variants):
        if variant.cubin == cubin:
            return number
    raise RevisionError(f"kernel {kernel.entry} has no variant {cubin[:40]!r}")
