"""What this daemon compiles with: fingerprints of passes, kernels, our own steps and the toolchain, taken
from the disk.

They are taken again when a file changes: an upgrade in place under a running daemon makes a new epoch, and
with it new keys, instead of old artifacts under a new name.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from fuse_cache.proto.digest import FieldDigest
from fuse_cache.proto.folders import listing
from fuse_cache.proto.toolchain import Toolchain
from fuse_cache.server.cxx import CxxProgram, cxx_identity, find_cxx
from fuse_cache.server.interpreter import Interpreter
from fuse_cache.server.key import SCHEMA, KeyFields
from fuse_cache.server.op_sources import op_files, op_tags

FINGERPRINT_COMMAND = (sys.executable, "-P", "-m", "fuse_cache.passes.fingerprint", "--json")
FINGERPRINT_S = 60.0
_CONTEXT = "fuse-cache 2026 epoch v1"
# These carry packets between processes and start them, or build nothing; they cannot change what is built.
_PLUMBING = frozenset({
    "__init__.py", "checked.py", "environment.py", "explain.py", "forkserver.py", "link.py", "pool.py",
    "processes.py", "proof.py", "protocol.py", "supervisor.py", "validator.py",
})  # fmt: skip
# Of proto/, what a worker never reaches. All else may change what it reads or packs.
_WIRE_ONLY = frozenset({
    "admin_pb2.py", "admin_pb2_grpc.py", "artifact_pb2.py", "artifact_pb2_grpc.py", "compile_pb2.py",
    "compile_pb2_grpc.py", "content.py", "fetch_chunk.py", "folders.py", "signing.py", "spec_pb2_grpc.py",
    "toolchain.py", "trust.py",
})  # fmt: skip
_HEADER_SOURCES = ("isa.py", "seed.py")
_FOLDERS = ("proto", "server", "passes", "kernels")
_BUILD_FOLDERS = ("passes", "kernels", os.path.join("server", "worker"))


class EpochError(RuntimeError):
    """The fingerprints cannot be taken; without them there are no keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """One consistent set of fingerprints."""

    name: str
    passes: Mapping[str, bytes]
    pass_manager: bytes  # what runs them, and the rounding rule: at work without any pass too
    kernel_sources: bytes
    worker_sources: bytes
    header_sources: bytes  # of these, what precompiled headers depend on; not in the key by itself
    toolchain: Toolchain
    cxx: str  # the C++ compiler, as cxx.py describes it
    op_modules: tuple[str, ...]
    op_tags: tuple[str, ...]  # the same, each with the digest of its sources

    def key_fields(
        self, *, request_digest: bytes, namespace: str, target: str, passes: tuple[str, ...]
    ) -> KeyFields:
        """Complete a request to the fields of its key.

        Raises:
            KeyError: a pass of that name does not exist here; nothing can be stored for it.
        """
        return KeyFields(
            request_digest=request_digest,
            namespace=namespace,
            passes=tuple((name, self.passes[name]) for name in passes),
            pass_manager=self.pass_manager,
            target=target,
            python=self.toolchain.python,
            torch_fingerprint=self.toolchain.torch_fingerprint,
            triton_fingerprint=self.toolchain.triton_fingerprint,
            cxx=self.cxx,
            kernel_sources=self.kernel_sources,
            worker_sources=self.worker_sources,
            op_modules=self.op_tags,
        )


def package_root() -> Path:
    """Return the folder that holds proto/, server/, passes/ and kernels/ of this installation."""
    return Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Stamps:
    """What the file system says of the sources: cheap to take, and different after every change."""

    build: bytes  # what workers load
    own: bytes  # what this process has loaded itself: a change needs a restart, not a new fork server
    toolchain: Toolchain
    cxx: CxxProgram


@dataclass(frozen=True, slots=True)
class Sources:
    """An epoch, the stamps it belongs to, whose both are, and where fingerprints are remembered."""

    epoch: Epoch
    stamps: Stamps
    interpreter: Interpreter
    memo: Path


def take_stamps(interpreter: Interpreter, *, op_modules: tuple[str, ...] = ()) -> Stamps:
    """Look at every source file (200 calls of stat, 1 ms), the wheels and the C++ compiler. Blocking.

    Raises:
        EpochError: the toolchain cannot be told.
    """
    build: list[str] = []
    own: list[str] = []
    root = interpreter.root
    for top in _FOLDERS:
        # Once for all files below, not once for each of them: links are followed by name at every look.
        for place, inside, names in _walk(os.path.realpath(root / top), top):
            is_build = inside.startswith(_BUILD_FOLDERS)
            for name in names:
                (build if is_build and name not in _PLUMBING else own).append(f"{place}/{name}")
    for module in op_modules:
        build += map(str, op_files(module, interpreter.foreign_path))
    try:
        return Stamps(_stamp(build), _stamp(own), interpreter.toolchain(), find_cxx())
    except RuntimeError as error:
        raise EpochError(str(error)) from error


def take_epoch(
    stamps: Stamps, interpreter: Interpreter, *, op_modules: tuple[str, ...], memo: Path | None = None
) -> Epoch:
    """Take the fingerprints that belong to `stamps`. Blocking; a third of a second, or 5 ms when `memo` has
    them.

    Raises:
        EpochError: the fingerprint command failed.
    """
    root = interpreter.root
    taken = _remembered(memo, stamps)
    if taken is None:
        taken = *_run_fingerprint_command(root), cxx_identity(stamps.cxx)
        _remember(memo, stamps, *taken)
    passes, pass_manager, cxx = taken
    kernels = kernel_sources(root)
    worker_sources = _sources(
        itertools.chain(
            (path for path in (root / "server" / "worker").glob("*.py") if path.name not in _PLUMBING),
            (path for path in (root / "proto").glob("*.py") if path.name not in _WIRE_ONLY),
        )
    )
    tags = op_tags(op_modules, interpreter.foreign_path)
    toolchain = stamps.toolchain
    hasher = FieldDigest(_CONTEXT)
    hasher.add("schema", SCHEMA).add("passes", tuple(sorted(passes.items())))
    hasher.add("pass_manager", pass_manager)
    hasher.add("kernel_sources", kernels).add("worker_sources", worker_sources)
    hasher.add("python", toolchain.python).add("torch", toolchain.torch_fingerprint)
    hasher.add("triton", toolchain.triton_fingerprint).add("cxx", cxx).add("op_modules", tags)
    return Epoch(
        name=hasher.digest()[:8].hex(),
        passes=passes,
        pass_manager=pass_manager,
        kernel_sources=kernels,
        worker_sources=worker_sources,
        header_sources=_sources(root / "server" / "worker" / name for name in _HEADER_SOURCES),
        toolchain=toolchain,
        cxx=cxx,
        op_modules=op_modules,
        op_tags=tags,
    )


def kernel_sources(root: Path) -> bytes:
    """Return the digest of what all kernels share, and of what compiles them for targets that are not here.

    One operator's own count with the passes that use it.
    """
    kernels = root / "kernels"
    return _sources(itertools.chain(kernels.glob("*.py"), (kernels / "targets").rglob("*.py")))


def _walk(place: str, inside: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield each folder at and below `place`: its path, what `inside` makes of it, and its sources' names."""
    found = listing(place)
    yield place, inside, [name for name in found.files if name.endswith(".py")]
    for name in found.folders:
        if name != "__pycache__":
            yield from _walk(f"{place}/{name}", f"{inside}/{name}")


def _stamp(paths: Iterable[str]) -> bytes:
    lines = []
    for path in paths:
        with contextlib.suppress(OSError):  # Being replaced just now: the next look differs.
            info = os.stat(path)
            lines.append(f"{path}\0{info.st_size}\0{info.st_mtime_ns}\0{info.st_ctime_ns}\0{info.st_ino}\n")
    return blake3("".join(lines).encode()).digest()


def _sources(paths: Iterable[Path]) -> bytes:
    hasher = blake3(derive_key_context="fuse-cache 2026 sources v1")
    for path in sorted(paths):
        data = path.read_bytes()
        hasher.update(f"{path.name}\0{len(data)}\0".encode() + data)
    return hasher.digest()


def _run_fingerprint_command(root: Path) -> tuple[dict[str, bytes], bytes]:
    """Return the passes' fingerprints and their manager's, taken by a process of its own: passes are never
    imported here.

    Vfork and exec, so gRPC's handlers do not run.
    """
    try:
        command = (*FINGERPRINT_COMMAND, "--root", str(root))
        done = subprocess.run(command, capture_output=True, timeout=FINGERPRINT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EpochError(f"the pass fingerprints cannot be taken: {error}") from error
    if done.returncode:
        last_line = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise EpochError(f"the pass fingerprints cannot be taken: {last_line}; reinstall fuse-cache")
    return _fingerprints(json.loads(done.stdout))


def _fingerprints(found: Mapping[str, Any]) -> tuple[dict[str, bytes], bytes]:
    passes = {name: bytes.fromhex(digest) for name, digest in found["passes"].items()}
    return passes, bytes.fromhex(found["manager"])


def _remembered(memo: Path | None, stamps: Stamps) -> tuple[dict[str, bytes], bytes, str] | None:
    if memo is None:
        return None
    try:
        found = json.loads(memo.read_bytes())
        if found["stamp"] == _memo_stamp(stamps):
            return *_fingerprints(found), str(found["cxx"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # None yet, or of another version.
    return None


def _remember(
    memo: Path | None, stamps: Stamps, passes: Mapping[str, bytes], pass_manager: bytes, cxx: str
) -> None:
    if memo is None:
        return
    found = {
        "stamp": _memo_stamp(stamps),
        "passes": {name: digest.hex() for name, digest in passes.items()},
        "manager": pass_manager.hex(),
        "cxx": cxx,
    }
    temp = memo.with_name(f".{memo.name}.{os.getpid()}")
    try:
        temp.write_text(json.dumps(found))
        temp.replace(memo)
    except OSError:
        temp.unlink(missing_ok=True)  # It only saves time.


def _memo_stamp(stamps: Stamps) -> str:
    # Pass fingerprints cover files of proto/ too, so both stamps count.
    return blake3(stamps.build + stamps.own + repr(stamps.cxx).encode()).hexdigest()
