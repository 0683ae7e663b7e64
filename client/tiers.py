"""The client's own tiers: this process's memory, and a folder on this host. A hit costs no call.

Keyed by request digest under a scope: the daemon's epoch and the namespace. Both hold artifacts as they came;
the folder is untrusted, so everything read from it is verified like something from the wire, and what fails
is removed and is a miss.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from blake3 import blake3
from google.protobuf.message import DecodeError

from fuse_cache.client.errors import ArtifactRejectedError
from fuse_cache.client.files import read_whole, write_whole
from fuse_cache.client.forklock import ForkLock
from fuse_cache.client.verify import Artifact, Checker, Want
from fuse_cache.proto.artifact_pb2 import SignedManifest
from fuse_cache.proto.limits import CONTENT_BYTES, MANIFEST_BYTES

MEMORY_BYTES = 256 << 20  # An 80-layer model in 4 ranges is below 64 MiB; the host's memory is for weights.
DISK_BYTES = 4 << 30
_MAGIC = b"FCA\x01"
_HEADER_BYTES = 8  # magic, then the length of the signed manifest, big endian


class MemoryTier:
    """Artifacts of this process, bounded in bytes, least recently used first out. Safe for concurrent use."""

    def __init__(self, capacity_bytes: int = MEMORY_BYTES) -> None:
        self._capacity_bytes = capacity_bytes
        self._lock = ForkLock()  # Guards the two below. Nothing else is taken while it is held.
        self._entries: OrderedDict[tuple[str, bytes], Artifact] = OrderedDict()
        self._bytes = 0

    def get(self, scope: str, request_digest: bytes) -> Artifact | None:
        """Return the artifact, or None."""
        with self._lock:
            artifact = self._entries.get((scope, request_digest))
            if artifact is not None:
                self._entries.move_to_end((scope, request_digest))
            return artifact

    def put(self, scope: str, request_digest: bytes, artifact: Artifact) -> None:
        """Keep the artifact; one larger than the tier is not kept."""
        with self._lock:
            self._drop((scope, request_digest))
            if len(artifact.content) > self._capacity_bytes:
                return
            self._entries[scope, request_digest] = artifact
            self._bytes += len(artifact.content)
            while self._bytes > self._capacity_bytes:
                self._drop(next(iter(self._entries)))

    def delete(self, scope: str, request_digest: bytes) -> None:
        """Forget the artifact if it is there."""
        with self._lock:
            self._drop((scope, request_digest))

    def _drop(self, key: tuple[str, bytes]) -> None:
        artifact = self._entries.pop(key, None)
        if artifact is not None:
            self._bytes -= len(artifact.content)


class DiskTier:
    """Artifacts in a folder, one file each, shared by all processes that use it. Safe for concurrent use.

    A file appears whole or not. The folder may be read-only or hold other users' files: what verifies is
    used, what cannot be written costs one warning. Files used least recently go when there are more bytes
    than `capacity_bytes`.
    """

    def __init__(self, folder: Path, capacity_bytes: int = DISK_BYTES) -> None:
        self._folder = folder
        self._capacity_bytes = capacity_bytes
        # Guards _bytes: what the folder held when it was last counted, and our writes since.
        self._lock = ForkLock()
        self._bytes: int | None = None

    def get(self, scope: str, want: Want, checker: Callable[[], Checker]) -> Artifact | None:
        """Return the verified artifact, or None.

        Raises:
            ArtifactRejectedError: there was one and it failed a check; it is gone now.
        """
        path = self._path(scope, want.request_digest)
        try:
            data = read_whole(path, CONTENT_BYTES + MANIFEST_BYTES + _HEADER_BYTES)
        except OSError:
            return None
        try:
            signed, content = _split(data)
            found = checker()
            artifact = found.content(signed, found.manifest(signed, want), content)
        except ArtifactRejectedError:
            with suppress(OSError):
                path.unlink()
            raise
        with suppress(OSError):
            os.utime(path)  # The mark of use that eviction goes by.
        return artifact

    def put(self, scope: str, request_digest: bytes, artifact: Artifact) -> None:
        """Keep the artifact if the folder can be written."""
        signed = artifact.signed.SerializeToString()
        data = b"".join([_MAGIC, len(signed).to_bytes(4, "big"), signed, artifact.content])
        if len(data) > self._capacity_bytes:
            return
        if write_whole(self._path(scope, request_digest), data, room=self._folder):
            with self._lock:
                if self._bytes is None:
                    self._bytes = sum(size for _, size, _ in self._files())
                else:
                    self._bytes += len(data)
                if self._bytes > self._capacity_bytes:
                    self._evict()

    def delete(self, scope: str, request_digest: bytes) -> None:
        """Remove the artifact if it is there and can be removed."""
        with suppress(OSError):
            self._path(scope, request_digest).unlink()

    def _path(self, scope: str, request_digest: bytes) -> Path:
        # A scope holds texts from outside: only its digest may become a path.
        return (
            self._folder
            / "artifacts"
            / blake3(scope.encode()).hexdigest()[:16]
            / f"{request_digest.hex()}.fca"
        )

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Yield (time of last use, bytes, path) of every artifact of every epoch."""
        for path in (self._folder / "artifacts").glob("*/*.fca"):
            with suppress(OSError):
                status = path.stat()
                yield status.st_mtime, status.st_size, path

    def _evict(self) -> None:
        """Remove the files used least recently until a tenth of the room is free. Called with the lock
        held."""
        files = sorted(self._files())  # Counted anew: other processes write here too.
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= self._capacity_bytes * 9 // 10:
                break
            with suppress(OSError):
                path.unlink()
                total -= size
        self._bytes = total


def _split(data: bytes) -> tuple[SignedManifest, bytes]:
    """Return manifest and content of a file.

    Raises:
        ArtifactRejectedError: BAD_DIGEST, it is not a whole file of this form.
    """
    length = int.from_bytes(data[4:_HEADER_BYTES], "big")
    if data[:4] != _MAGIC or len(data) < _HEADER_BYTES + length:
        raise ArtifactRejectedError("BAD_DIGEST", "a file that is not an artifact, or not a whole one")
    signed = SignedManifest()
    try:
        signed.ParseFromString(data[_HEADER_BYTES : _HEADER_BYTES + length])
    except DecodeError as error:
        raise ArtifactRejectedError("BAD_DIGEST", "a file whose manifest cannot be parsed") from error
    return signed, data[_HEADER_BYTES + length :]
