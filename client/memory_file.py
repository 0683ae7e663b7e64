"""Bytes as a file that a loader can open by its path: in memory, since a host may have no disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import tempfile
from collections.abc import Iterator
from typing import Final

_MFD_EXEC: Final = 0x10  # Linux 6.3; older kernels answer EINVAL and make every memfd executable.

_counter = itertools.count(1)


@contextlib.contextmanager
def as_file(data: bytes) -> Iterator[str]:
    """Give a path at which a loader (dlopen, the CUDA driver) finds `data`: of sealed memory, or of a
    temporary file where there is no memfd or no /proc.
    """
    try:
        fd = _memory_file(data)
    except OSError:
        with tempfile.NamedTemporaryFile(prefix="fuse-cache-", suffix=".so") as file:
            file.write(data)
            file.flush()
            yield file.name
        return
    try:
        yield _unique_path(fd)
    finally:
        os.close(fd)


def _memory_file(data: bytes) -> int:
    if not os.path.isdir("/proc/self/fd"):
        raise OSError(errno.ENOENT, "there is no /proc")
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create("fuse-cache", flags | _MFD_EXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.memfd_create("fuse-cache", flags)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _unique_path(fd: int) -> str:
    """Name `fd` as no other call has: dlopen answers a name it has seen with the library it then loaded,
    and numbers come again.
    """
    bits = bin(next(_counter))[2:]
    return f"/proc/self/fd/{''.join('./' if bit == '0' else './/' for bit in bits)}{fd}"
