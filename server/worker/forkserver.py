"""The fork server: a process that has torch and Inductor loaded and forks one child per compilation.

Loading takes seconds, a fork 10 ms. It has no threads and never talks gRPC, so that forking it is safe. It is
started and watched by the supervisor, which alone decides about limits; all it does itself is fork, and reap
its children together with their process groups. `--entry module:function` names the build; the module's
`preload()`, if it has one, runs before the first fork.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import resource
import selectors
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, cast

from fuse_cache.server.worker import processes
from fuse_cache.server.worker.protocol import (
    EXIT_BUILT,
    EXIT_FAILED,
    MAX_MESSAGE_CHARS,
    Build,
    BuildFailed,
    Built,
    encode_event,
    read_job,
    read_seed_job,
    write_built,
    write_failure,
)

MAX_FILE_BYTES = 8 << 30  # No artifact comes near; a loop that writes for ever ends here, not on a full disk.
WORKER_NICENESS = 5  # Lookups go before compilations on a busy machine.


def load_entry(entry: str) -> Build:
    """Import `module:function` and let the module load what its builds will need."""
    function = load_function(entry)
    preload = getattr(sys.modules[entry.partition(":")[0]], "preload", None)
    if preload is not None:
        preload()
    return cast(Build, function)


def load_function(entry: str) -> Callable[..., object]:
    """Import the function that `module:function` names."""
    module_name, _, function_name = entry.partition(":")
    function: Callable[..., object] = getattr(importlib.import_module(module_name), function_name)
    return function


class ForkServer:
    """Forks children on request and tells when they end. Runs in a process of its own."""

    def __init__(self, control: socket.socket, build: Build) -> None:
        self._control = control
        self._build = build
        self._jobs: dict[int, str] = {}  # pid of each running child -> its job
        self._retiring = False
        self._wakeup_read, self._wakeup_write = os.pipe()

    def serve(self) -> None:
        """Run until the supervisor is gone, or until it retires us and the last child has ended."""
        for fd in (self._wakeup_read, self._wakeup_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector = selectors.DefaultSelector()
        selector.register(self._control, selectors.EVENT_READ)
        selector.register(self._wakeup_read, selectors.EVENT_READ)
        processes.send_packet(self._control, {"event": "ready"})
        while not (self._retiring and not self._jobs):
            for key, _ in selector.select():
                if key.fileobj is self._control:
                    received = processes.receive_packet(self._control)
                    if received is None:
                        return
                    self._obey(*received)
                else:
                    _drain(self._wakeup_read)
            self._reap()
        selector.close()

    def _obey(self, message: dict[str, object], descriptors: list[int]) -> None:
        if message["op"] == "retire":
            self._retiring = True
            return
        (events_fd,) = descriptors
        template_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._run_child(template_pid, Path(str(message["dir"])), events_fd)
        os.close(events_fd)
        self._jobs[pid] = str(message["id"])
        processes.send_packet(self._control, {"event": "started", "id": message["id"], "pid": pid})

    def _reap(self) -> None:
        while (ended := processes.next_exit()) is not None:
            pid, code = ended
            job_id = self._jobs.pop(pid, None)
            if job_id is not None:
                processes.send_packet(
                    self._control, {"event": "ended", "id": job_id, "pid": pid, "code": code}
                )

    def _run_child(self, template_pid: int, folder: Path, events_fd: int) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            # Descendants that outlive their parent come to this process, so that the supervisor finds them
            # below it.
            processes.become_subreaper()
            processes.die_with_parent(template_pid)
            self._control.close()
            os.close(self._wakeup_read)
            os.close(self._wakeup_write)
            _settle_in(folder)
            code = run_build(self._build, folder, events_fd)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # Not exit: what the fork server registered to run at its end is not the child's.


def run_build(build: Build, folder: Path, events_fd: int) -> int:
    """Run one build in this process and leave its result in `folder`. Returns the exit status."""
    stage = "start"
    os.set_blocking(events_fd, False)

    def emit(next_stage: str, detail: str) -> None:
        nonlocal stage
        stage = next_stage
        # Progress is for people; a reader that is slow or gone must not stop a build.
        with contextlib.suppress(OSError):
            os.write(events_fd, encode_event(next_stage, detail))

    try:
        seed = read_seed_job(folder)
        if seed is not None:
            entry, seed_dir, target = seed
            load_function(entry)(seed_dir, (target,))
            write_built(folder, Built(content=b"seed"))
        else:
            job = read_job(folder)
            run: Build = cast(Build, load_function(job.entry)) if job.entry else build
            write_built(folder, run(job, emit))
        return EXIT_BUILT
    except BuildFailed as failure:
        traceback.print_exc()
        failure.stage = failure.stage or stage
        write_failure(folder, failure)
    except Exception as error:
        traceback.print_exc()
        write_failure(folder, classify(error, stage))
    return EXIT_FAILED


def classify(error: BaseException, stage: str) -> BuildFailed:
    """Say what an exception of a build means: the machine's trouble is retried, the graph's own is not."""
    message = f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS]
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, BuildFailed):
            return BuildFailed(
                cause.reason, cause.message, stage=cause.stage or stage, deterministic=cause.deterministic
            )
        # g++ says this of its cc1plus when the kernel ran out of memory.
        if isinstance(cause, MemoryError) or "Killed signal terminated program" in str(cause):
            return BuildFailed("OUT_OF_MEMORY", message, stage=stage, deterministic=False)
        if isinstance(cause, OSError):
            return BuildFailed("INTERNAL", message, stage=stage, deterministic=False)
        cause = cause.__cause__ or cause.__context__
    return BuildFailed("COMPILE_FAILED", message, stage=stage, deterministic=True)


def _settle_in(folder: Path) -> None:
    """Give a child its own folders, its own log and its own bounds."""
    for name in ("tmp", "inductor", "triton", "home"):
        (folder / name).mkdir(exist_ok=True)
    os.environ.update(
        TMPDIR=str(folder / "tmp"),
        HOME=str(folder / "home"),
        TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"),
        TRITON_CACHE_DIR=str(folder / "triton"),
    )
    tempfile.tempdir = None  # It was computed from the fork server's environment.
    os.chdir(folder)
    log_fd = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(log_fd)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    os.nice(WORKER_NICENESS)
    # When the machine runs out of memory, a compilation goes before the daemon does.
    Path("/proc/self/oom_score_adj").write_text("1000")


def _drain(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(fd, 4096):
            pass


def main(arguments: list[str] | None = None) -> int:
    """Load, then serve. A load that fails is told to the supervisor."""
    parser = argparse.ArgumentParser(prog="python -m fuse_cache.server.worker.forkserver")
    parser.add_argument("--entry", required=True, help="module:function of the build")
    parser.add_argument("--parent", type=int, required=True, help="pid of the supervisor")
    options = parser.parse_args(arguments)
    processes.die_with_parent(options.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A Ctrl-C at the terminal is the daemon's to answer.
    control = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    # Torch's own way to look for a GPU without starting CUDA, which a fork could not use any more.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    try:
        build = load_entry(options.entry)
    except BaseException as error:
        traceback.print_exc()
        processes.send_packet(
            control, {"event": "failed", "message": f"{type(error).__name__}: {error}"[:1000]}
        )
        return 1
    gc.collect()
    gc.freeze()  # Children then do not touch (and so copy) the pages of what was loaded.
    ForkServer(control, build).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
