"""What the daemon and a worker say to each other: files in the job's folder, and progress lines on a pipe.

The worker is not trusted: nothing is pickled, every field is checked on the way back, sizes are bounded.

    <dir>/graph, <dir>/request, <dir>/job.json      daemon -> worker
    <dir>/seed.json                                 instead of these, for a job that makes a seed
    <dir>/content, <dir>/built.json                 worker -> daemon, when it exits with EXIT_BUILT
    <dir>/failure.json                              worker -> daemon, when it exits with EXIT_FAILED
    <dir>/tmp, <dir>/inductor, <dir>/triton         the worker's own
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypedDict

from fuse_cache.server.worker.checked import ProtocolError, count, flag, number, objects, read_object, text

EXIT_BUILT = 0
EXIT_FAILED = 3  # failure.json says why. Any other status, or a signal, is a death.

MAX_EVENT_BYTES = 2048  # A pipe write of up to PIPE_BUF (4096) is atomic, so lines never mix.
MAX_MESSAGE_CHARS = 4000  # Of a failure; a C++ compiler's output can be megabytes.

# What a build tells while it runs: a stage ("rebuild", "passes", "inductor", "seal") and a detail for people.
Emit: TypeAlias = Callable[[str, str], None]


class PassRecord(TypedDict, total=False):
    """What one pass did. Names and meaning as in artifact.proto."""

    name: str
    on: bool
    reason: str
    candidates: int
    matches: int
    milliseconds: float
    bytes_saved: int
    is_fusion: bool


class NearMiss(TypedDict, total=False):
    """A candidate that no pattern took. As in artifact.proto; `pass_name` is its field `pass`."""

    pass_name: str
    reason: str
    node: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One compilation. `dir` is private to it; `seed_dir` is a read-only Inductor folder to copy, or None."""

    job_id: str
    dir: Path
    graph: bytes
    request: bytes
    op_modules: tuple[str, ...] = ()  # to import before the graph is rebuilt: they register custom operators
    seed_dir: Path | None = None
    entry: str = ""  # another function than the fork server's own build, as `module:function`


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What a build returns. `content` is a packed container (proto/container.py)."""

    content: bytes
    passes: tuple[PassRecord, ...] = ()
    near_misses: tuple[NearMiss, ...] = ()
    nodes: int = 0
    cudagraph_mode: str = "NONE"
    compile_seconds: float = 0.0


class BuildFailed(Exception):
    """A build that could say why it failed. Raised by the build function; subclass it freely.

    `reason` is an ErrorReason without its prefix ("OP_MISSING", "NOT_CACHEABLE", "COMPILE_FAILED", ...).
    `deterministic`: the same request fails the same way, so that the daemon may remember it for a minute.
    """

    def __init__(self, reason: str, message: str, *, stage: str = "", deterministic: bool = True) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.stage = stage
        self.deterministic = deterministic


# The form of a build function: `fuse_cache.server.worker.compile.build`, or a fake one of a test.
Build: TypeAlias = Callable[[Job, Emit], Built]


def write_job_files(
    folder: Path,
    *,
    job_id: str,
    request: bytes,
    op_modules: tuple[str, ...] = (),
    seed_dir: Path | None = None,
    entry: str = "",
) -> None:
    """Write all of a job but its graph, which the daemon has spooled to `<folder>/graph` already.

    `entry` is called in the build's place.
    """
    (folder / "request").write_bytes(request)
    header = {
        "job_id": job_id,
        "op_modules": list(op_modules),
        "seed_dir": None if seed_dir is None else str(seed_dir),
        "entry": entry,
    }
    (folder / "job.json").write_text(json.dumps(header))


def write_seed_job(folder: Path, *, entry: str, seed_dir: Path, target: str) -> None:
    """Write a job that makes a seed: `entry` is called with the folder to fill and a tuple of one target."""
    (folder / "seed.json").write_text(json.dumps({"entry": entry, "dir": str(seed_dir), "target": target}))


def read_seed_job(folder: Path) -> tuple[str, Path, str] | None:
    """Return entry, folder to fill and target, or None when this is a compilation."""
    try:
        order = json.loads((folder / "seed.json").read_text())
    except FileNotFoundError:
        return None
    return str(order["entry"]), Path(order["dir"]), str(order["target"])


def read_job(folder: Path) -> Job:
    """Read a job from its folder.

    Raises:
        ProtocolError: the folder does not hold a whole job.
    """
    try:
        header = json.loads((folder / "job.json").read_text())
        seed_dir = header["seed_dir"]
        return Job(
            job_id=str(header["job_id"]),
            dir=folder,
            graph=(folder / "graph").read_bytes(),
            request=(folder / "request").read_bytes(),
            op_modules=tuple(str(name) for name in header["op_modules"]),
            seed_dir=None if seed_dir is None else Path(seed_dir),
            entry=str(header["entry"]),
        )
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"not a job folder: {error}") from error


def write_built(folder: Path, built: Built) -> None:
    """Write what a build returned; `built.json` comes last, so that it never stands beside half a content."""
    (folder / "content").write_bytes(built.content)
    report = {
        "passes": list(built.passes),
        "near_misses": list(built.near_misses),
        "nodes": built.nodes,
        "cudagraph_mode": built.cudagraph_mode,
        "compile_seconds": built.compile_seconds,
    }
    (folder / "built.json").write_text(json.dumps(report))


def read_built(folder: Path, *, max_content_bytes: int) -> Built:
    """Read and check what a worker wrote.

    Raises:
        ProtocolError: a file is missing or not of the form.
        BuildFailed: the content is larger than an artifact may be.
    """
    report = read_object(folder / "built.json")
    content_path = folder / "content"
    try:
        size_bytes = content_path.stat().st_size
        if size_bytes > max_content_bytes:
            message = f"the artifact has {size_bytes} bytes, the limit is {max_content_bytes}"
            raise BuildFailed("NOT_CACHEABLE", message, stage="seal")
        content = content_path.read_bytes()
    except OSError as error:
        raise ProtocolError(f"the worker left no content: {error.strerror}") from error
    return Built(
        content=content,
        passes=tuple(_record(item) for item in objects(report, "passes")),
        near_misses=tuple(_near_miss(item) for item in objects(report, "near_misses")),
        nodes=count(report, "nodes"),
        cudagraph_mode=text(report, "cudagraph_mode"),
        compile_seconds=number(report, "compile_seconds"),
    )


def write_failure(folder: Path, failure: BuildFailed) -> None:
    """Write why a build failed."""
    report = {
        "reason": failure.reason,
        "stage": failure.stage,
        "message": failure.message[:MAX_MESSAGE_CHARS],
        "deterministic": failure.deterministic,
    }
    (folder / "failure.json").write_text(json.dumps(report))


def read_failure(folder: Path) -> BuildFailed:
    """Read why a build failed.

    Raises:
        ProtocolError: the file is missing or not of the form.
    """
    report = read_object(folder / "failure.json")
    return BuildFailed(
        text(report, "reason"),
        text(report, "message")[:MAX_MESSAGE_CHARS],
        stage=text(report, "stage"),
        deterministic=flag(report, "deterministic"),
    )


def encode_event(stage: str, detail: str) -> bytes:
    """Encode one progress line. Long details are cut."""
    room = MAX_EVENT_BYTES
    while True:
        line = json.dumps([stage[:64], detail[:room]]).encode() + b"\n"
        if len(line) <= MAX_EVENT_BYTES:
            return line
        room //= 2


def decode_event(line: bytes) -> tuple[str, str]:
    """Decode one progress line.

    Raises:
        ProtocolError: the line is not of the form.
    """
    try:
        stage, detail = json.loads(line)
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError("not a progress line") from error
    if not isinstance(stage, str) or not isinstance(detail, str):
        raise ProtocolError("not a progress line")
    return stage, detail


def _record(item: dict[str, object]) -> PassRecord:
    return PassRecord(
        name=text(item, "name"),
        on=flag(item, "on"),
        reason=text(item, "reason", ""),
        candidates=count(item, "candidates", 0),
        matches=count(item, "matches", 0),
        milliseconds=number(item, "milliseconds", 0.0),
        bytes_saved=count(item, "bytes_saved", 0),
        is_fusion=flag(item, "is_fusion", False),
    )


def _near_miss(item: dict[str, object]) -> NearMiss:
    return NearMiss(
        pass_name=text(item, "pass_name"),
        reason=text(item, "reason"),
        node=text(item, "node", ""),
        detail=text(item, "detail", ""),
    )
