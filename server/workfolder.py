"""The daemon's scratch folder: jobs, seeds in the making, and graphs on their way in.

Nothing in it outlives its daemon.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import tempfile
import uuid
from pathlib import Path

SPOOL_BYTES = 1 << 30  # 128 graphs of the largest size, or 7,000 of the largest seen in practice.
_LOCK = "lock"


class WorkFolder:
    """The daemon's private scratch folder.

    One of its own per daemon; `sweep` removes those of dead daemons.
    """

    def __init__(self, base: Path) -> None:
        """Make the folder below `base`.

        Raises:
            OSError: it cannot be made, or belongs to somebody else.
        """
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = os.lstat(base)
        if info.st_uid != os.getuid() or base.is_symlink():
            raise PermissionError(f"{base} belongs to another user; set work_dir to a folder of your own")
        self.base = base
        made = Path(tempfile.mkdtemp(prefix="new-", dir=base))
        self._lock_fd = os.open(made / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        # Under the name that another daemon's sweep looks for only once it is locked.
        self.path = made.rename(made.with_name(made.name.replace("new-", "daemon-", 1)))
        self._spooled_bytes = 0

    def sweep(self) -> None:
        """Remove what dead daemons left. Blocking: it may be a gigabyte."""
        for folder in self.base.glob("daemon-*"):
            try:
                fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                continue  # Not ours, or gone.
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            except BlockingIOError:
                pass  # Its daemon lives.
            finally:
                os.close(fd)

    def new_folder(self, kind: str) -> Path:
        """Make an empty private folder."""
        path = self.path / f"{kind}-{uuid.uuid4().hex[:16]}"
        path.mkdir(mode=0o700)
        return path

    def reserve(self, size_bytes: int) -> bool:
        """Take a part of the budget for graphs; tell whether there was room."""
        if self._spooled_bytes + size_bytes > SPOOL_BYTES:
            return False
        self._spooled_bytes += size_bytes
        return True

    def release(self, size_bytes: int) -> None:
        """Give a part of the budget back."""
        self._spooled_bytes -= size_bytes

    async def remove(self, folder: Path) -> None:
        """Remove a folder that `new_folder` made, off the event loop."""
        await asyncio.to_thread(shutil.rmtree, folder, True)

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)
