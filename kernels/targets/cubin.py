"""Reads what a compiled kernel says of itself, without a driver.

A cubin is an ELF file. Its ABI version says where the architecture stands in `e_flags`; what a kernel needs
stands in the section `.nv.info`, as the CUDA binary utilities (`cuobjdump -elf`) print it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

_MAGIC: Final = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_HEADER_BYTES: Final = 64
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
_NEW_ABI: Final = 8  # of sm_100 and later: the architecture is the second byte of e_flags, not the first
_SIZED: Final = 4  # format of an attribute that has a length
_REGCOUNT: Final = 0x2F  # EIATTR_REGCOUNT: symbol, registers of a thread


class CubinError(ValueError):
    """The bytes are not a kernel for an NVIDIA GPU."""


def architecture_of(cubin: bytes) -> str:
    """Return what `cubin` was compiled for, such as "sm_90".

    Raises:
        CubinError
    """
    _check(cubin)
    (flags,) = struct.unpack_from("<I", cubin, 0x30)
    return f"sm_{flags >> 8 & 0xFF if cubin[8] >= _NEW_ABI else flags & 0xFF}"


def functions_of(cubin: bytes) -> frozenset[str]:
    """Return the names of the functions in `cubin`: each has a section of code.

    Raises:
        CubinError
    """
    code = b".text."
    return frozenset(
        name.removeprefix(code).decode("ascii", "replace")
        for name, _ in _sections(cubin)
        if name.startswith(code)
    )


def registers_of(cubin: bytes) -> int:
    """Return how many registers a thread of the kernel in `cubin` needs, as a driver would tell: the most of
    any function in it.

    Raises:
        CubinError: the bytes are no cubin, or do not say.
    """
    counts = [
        struct.unpack("<II", value)[1]
        for kind, value in _attributes(_section(cubin, b".nv.info"))
        if kind == _REGCOUNT and len(value) == 8
    ]
    if not counts:
        raise CubinError("it does not say how many registers it needs")
    return int(max(counts))


def _check(cubin: bytes) -> None:
    if not cubin.startswith(_MAGIC) or len(cubin) < _HEADER_BYTES:
        raise CubinError("no ELF file of 64 bits")


def _sections(cubin: bytes) -> list[tuple[bytes, bytes]]:
    """Return (name, data) of each section."""
    _check(cubin)
    (offset,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    try:
        headers = [_SECTION.unpack_from(cubin, offset + size * number) for number in range(count)]
        texts = headers[names][4]
        found = []
        for header in headers:
            start = texts + header[0]
            name = cubin[start : cubin.index(b"\0", start)]
            found.append((name, cubin[header[4] : header[4] + header[5]]))
    except (struct.error, IndexError, ValueError, OverflowError) as error:
        raise CubinError(f"a damaged ELF file: {error}") from error
    return found


def _section(cubin: bytes, name: bytes) -> bytes:
    for found, data in _sections(cubin):
        if found == name:
            return data
    raise CubinError(f"an ELF file without a section {name.decode()}")


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (kind, value) of each attribute: one byte of format, one of kind, and two of value or length."""
    at = 0
    while at + 4 <= len(data):
        form, kind, length = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _SIZED:
            yield kind, data[at : at + length]
            at += length
