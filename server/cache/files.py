"""The file calls of the disk tier, all in one class, so that a test can lay faults over them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from typing import BinaryIO

# What opening says of something else than a file in a file's place: a folder, a socket, links in a circle.
NO_FILE_ERRNOS = frozenset({errno.EISDIR, errno.ENXIO, errno.ELOOP})


class Files:
    """Plain file calls. Each raises OSError as the system does."""

    def open_read(self, path: str) -> BinaryIO:
        # Without waiting: a pipe in its place would hold the thread for ever; as it is, it reads as empty.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            # Unbuffered: callers read in two or three large pieces; a buffer would copy 64 MiB once more.
            return open(descriptor, "rb", buffering=0)
        except OSError:  # A folder.
            os.close(descriptor)
            raise

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[int]:
        """Create `path` and hold a lock on it while it is written: an unlocked temp file has no living
        writer.
        """
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            # No locks on this file system: the age of a temp file decides alone.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield descriptor
        finally:
            os.close(descriptor)

    def write(self, descriptor: int, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]

    def replace(self, source: str, target: str) -> None:
        os.replace(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def discard(self, path: str) -> None:
        """Remove what is there, be it a folder."""
        try:
            self.unlink(path)
        except (IsADirectoryError, PermissionError):  # What POSIX has unlink say of a folder.
            if not os.path.isdir(path) or os.path.islink(path):
                raise
            shutil.rmtree(path)

    def make_dirs(self, path: str) -> None:
        os.makedirs(path, 0o700, exist_ok=True)

    def list(self, path: str) -> list[str]:
        return os.listdir(path)

    def stat(self, path: str) -> os.stat_result:
        return os.stat(path)

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        """Take real blocks: a sparse file reserves nothing."""
        os.posix_fallocate(descriptor, 0, size_bytes)

    def free_bytes(self, path: str) -> int:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def has_writer(self, path: str) -> bool:
        """Tell whether somebody holds the lock that `create` takes."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return False
