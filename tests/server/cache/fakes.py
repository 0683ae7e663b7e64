"""Tiers and file calls that fail as told."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from typing import BinaryIO

from fuse_cache.server.cache.files import Files
from fuse_cache.server.cache.memory import MemoryTier
from fuse_cache.server.cache.tier import Entry, Space, Stored, TierUnavailableError, TierWrapper


class SwitchTier(TierWrapper):
    """A memory tier that can be told to be down, or to hang until it is told to go on."""

    def __init__(self, name: str = "slow", limit_bytes: int = 1 << 26) -> None:
        super().__init__(MemoryTier(limit_bytes=limit_bytes, name=name))
        self.down = False
        self.calls = 0
        self.go_on = threading.Event()
        self.go_on.set()

    def _pass(self) -> None:
        self.calls += 1
        self.go_on.wait()
        if self.down:
            raise TierUnavailableError(self.name, "switched off")

    def get(self, space: Space, name: bytes) -> Entry | None:
        self._pass()
        return super().get(space, name)

    def put(self, space: Space, name: bytes, entry: Entry) -> None:
        self._pass()
        super().put(space, name, entry)

    def contains(self, space: Space, name: bytes) -> bool:
        self._pass()
        return super().contains(space, name)

    def delete(self, space: Space, name: bytes) -> bool:
        self._pass()
        return super().delete(space, name)

    def naming(self, content: bytes) -> list[bytes]:
        self._pass()
        return super().naming(content)

    def iterate(self, space: Space) -> Iterator[Stored]:
        self._pass()
        return super().iterate(space)


class FaultyFiles(Files):
    """File calls that raise what `faults` says: call name -> errno, for as many calls as `times` says (None:
    all).
    """

    def __init__(self) -> None:
        self.faults: dict[str, tuple[int, int | None]] = {}

    def fail(self, call: str, code: int, times: int | None = None) -> None:
        self.faults[call] = (code, times)

    def _pass(self, call: str, path: str) -> None:
        if call not in self.faults:
            return
        code, times = self.faults[call]
        if times is not None:
            if times <= 1:
                del self.faults[call]
            else:
                self.faults[call] = (code, times - 1)
        raise OSError(code, os.strerror(code), path)

    def open_read(self, path: str) -> BinaryIO:
        self._pass("open_read", path)
        return super().open_read(path)

    def write(self, descriptor: int, data: bytes) -> None:
        if "write" in self.faults and self.faults["write"][0] == errno.ENOSPC:
            super().write(descriptor, data[: len(data) // 2])  # A disk fills in the middle of a file.
        self._pass("write", "")
        super().write(descriptor, data)

    def replace(self, source: str, target: str) -> None:
        self._pass("replace", target)
        super().replace(source, target)

    def unlink(self, path: str) -> None:
        self._pass("unlink", path)
        super().unlink(path)

    def make_dirs(self, path: str) -> None:
        self._pass("make_dirs", path)
        super().make_dirs(path)

    def list(self, path: str) -> list[str]:
        self._pass("list", path)
        return super().list(path)
