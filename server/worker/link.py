"""The daemon's end of the supervisor: start it, ask for processes, hear of their ends, replace it."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from fuse_cache.server.worker import processes
from fuse_cache.server.worker.environment import workers_environment

log = logging.getLogger(__name__)

RESTART_DELAY_S = 0.2
PING_S = 5.0
# A supervisor answers in a millisecond, so one that is silent for 15 s hangs. Not one long wait: it would be
# over as soon as a daemon that was stopped itself goes on.
MAX_UNANSWERED = 3


class Loading(enum.Enum):
    """Where the fork server is."""

    ASLEEP = "asleep"  # not asked for yet: `wait_ready` has it loaded
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended: its exit code (negative: a signal), and who ended it ("": itself)."""

    code: int
    why: str


class SupervisorLink:
    """Talks to one supervisor process at a time.

    `start` may be called before there is an event loop; the rest not.
    """

    def __init__(
        self,
        entry: str,
        environment: Mapping[str, str],
        *,
        executable: str = sys.executable,
        siblings: Collection[SupervisorLink] | None = None,
    ) -> None:
        """Take the build's `module:function`, and the Python that runs it.

        `siblings`: the links to all supervisors of this process, which has no other children: orphans are
        theirs.
        """
        self._entry = entry
        self._executable = executable
        self._environment = workers_environment(environment)
        self._siblings = siblings
        self._wanted = False  # A fork server was asked for.
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._ended: dict[str, asyncio.Future[Ended]] = {}
        self._pids: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._closing = False
        self._restart: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._answered = False
        self.loading = Loading.LOADING
        self.message = ""  # Why loading failed.
        self.on_change: Callable[[Loading], None] = lambda loading: None

    @property
    def supervisor_pid(self) -> int:
        """The pid of the supervisor."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the supervisor.

        The first time, before gRPC exists; again after its death, by vfork and exec.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        module = "fuse_cache.server.worker.supervisor"
        argv = [self._executable, "-P", "-m", module, "--entry", self._entry, "--parent", str(os.getpid())]
        # No preexec_fn and close_fds: CPython then uses vfork, which runs none of gRPC's fork handlers.
        self._process = subprocess.Popen(
            argv, stdin=theirs.fileno(), stdout=2, env=self._environment, start_new_session=True
        )
        theirs.close()
        ours.setblocking(False)
        self._socket = ours

    def attach(self, *, load: bool = True) -> None:
        """Begin to listen, in the running event loop, and have a fork server loaded, now or when it is first
        waited for.

        Not before: loading torch takes both cores of a small machine, and lookups are to be answered first.
        """
        assert self._socket is not None
        asyncio.get_running_loop().add_reader(self._socket, self._readable)
        if load:
            self._load()
        else:
            self.loading = Loading.ASLEEP
        self._watch = asyncio.create_task(self._watch_supervisor())

    async def wait_ready(self, timeout_s: float) -> Loading:
        """Wait until the fork server is loaded or has failed to, or the time is over; tell which."""
        if self.loading is Loading.ASLEEP:
            self._load()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.loading is Loading.LOADING:
                    self._changed.clear()
                    await self._changed.wait()
        return self.loading

    async def wait_up(self, timeout_s: float) -> None:
        """Wait until there is a supervisor to ask; after `timeout_s` seconds go on without."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._socket is None and not self._closing:
                    await asyncio.sleep(0.02)

    def start_job(self, job_id: str, folder: str, events_fd: int, *, seconds: float, max_bytes: int) -> None:
        """Ask for a worker. `ended` tells the rest."""
        order = {"op": "job", "id": job_id, "dir": folder, "seconds": seconds, "bytes": max_bytes}
        self._order(job_id, order, (events_fd,))

    def start_tool(
        self, tool_id: str, argv: list[str], stdio_fd: int, *, seconds: float | None = None
    ) -> None:
        """Ask for another program, with `stdio_fd` as its standard input and output."""
        self._order(tool_id, {"op": "tool", "id": tool_id, "argv": argv, "seconds": seconds}, (stdio_fd,))

    def kill(self, task_id: str) -> None:
        """Have a job or tool killed. It then ends; without a supervisor it has ended already."""
        self._tell({"op": "kill", "id": task_id})

    def reload(self) -> None:
        """Load a new fork server, unless it sleeps yet; the old one ends with its last job."""
        if self._wanted:
            self._load()

    async def ended(self, task_id: str) -> Ended:
        """Wait for the end of a job or tool that was started."""
        try:
            return await asyncio.shield(self._ended[task_id])
        finally:
            if task_id in self._ended and self._ended[task_id].done():
                del self._ended[task_id]

    async def close(self) -> None:
        """End the supervisor and all below it."""
        self._closing = True
        for task in (self._restart, self._watch):
            if task is not None:
                task.cancel()
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        if self._process is not None:
            process = self._process
            try:
                async with asyncio.timeout(5):
                    while process.poll() is None:
                        await asyncio.sleep(0.01)
            except TimeoutError:
                process.kill()
                process.wait()
        for future in self._ended.values():
            if not future.done():
                future.set_result(Ended(-1, "asked"))

    def _order(self, task_id: str, order: dict[str, object], descriptors: Iterable[int]) -> None:
        future: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._ended[task_id] = future
        try:
            assert self._socket is not None
            processes.send_packet(self._socket, order, descriptors)
        except (OSError, AssertionError):
            future.set_result(Ended(-1, "not_ready"))

    def _load(self) -> None:
        self._wanted = True
        self._set_loading(Loading.LOADING)
        self._tell({"op": "reload"})

    def _tell(self, order: dict[str, object]) -> None:
        """Send what a supervisor that has died, or is being replaced, need not hear."""
        if self._socket is not None:
            with contextlib.suppress(OSError):  # The read side notices its death.
                processes.send_packet(self._socket, order)

    def _set_loading(self, loading: Loading, message: str = "") -> None:
        self.loading, self.message = loading, message
        self._changed.set()
        self.on_change(loading)

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            received = processes.receive_packet(self._socket)
        except BlockingIOError:
            return
        if received is None:
            self._supervisor_died()
            return
        message = received[0]
        event, task_id = message["event"], str(message.get("id", ""))
        if event == "pong":
            self._answered = True
        elif event == "ready":
            self._set_loading(Loading.READY)
        elif event == "loading":
            self._set_loading(Loading.LOADING)
        elif event == "not_ready":
            self._set_loading(Loading.FAILED, str(message["message"]))
        elif event == "started":
            self._pids[task_id] = int(str(message["pid"]))
        elif event == "ended":
            self._pids.pop(task_id, None)
            future = self._ended.get(task_id)
            if future is not None and not future.done():
                future.set_result(Ended(int(str(message["code"])), str(message["why"])))

    def _supervisor_died(self) -> None:
        assert self._socket is not None
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._socket = None
        if self._watch is not None:
            self._watch.cancel()
        if self._closing:
            return
        # The kernel has killed its children and theirs (die_with_parent); compilers that those ran are left.
        table = processes.process_table()
        for pid in self._pids.values():
            processes.kill_tree(pid, table)
        self._pids.clear()
        if self._wanted:
            self._set_loading(Loading.LOADING)
        for future in self._ended.values():
            if not future.done():
                future.set_result(Ended(-9, "supervisor"))
        self._restart = asyncio.create_task(self._start_again())

    async def _watch_supervisor(self) -> None:
        """Kill a supervisor that hangs: its end is noticed, whoever waits is told, and another one starts."""
        unanswered = 0
        while unanswered < MAX_UNANSWERED:
            self._answered = False
            self._tell({"op": "ping"})
            await asyncio.sleep(PING_S)
            unanswered = 0 if self._answered else unanswered + 1
        assert self._process is not None
        log.error("the supervisor hangs and is replaced", extra={"pid": self._process.pid})
        self._process.kill()

    async def _start_again(self) -> None:
        await asyncio.sleep(RESTART_DELAY_S)
        assert self._process is not None
        while self._process.poll() is None:
            await asyncio.sleep(0.02)
        if self._siblings is not None:
            await _bury_orphans({link.supervisor_pid for link in self._siblings if link is not self})
        self.start()
        self.attach(load=self._wanted)


async def _bury_orphans(living: Collection[int]) -> None:
    """Kill and reap every child of this process but the `living` supervisors: what the dead one left to the
    subreaper above."""
    while True:
        table = processes.process_table()
        orphans = [
            process.pid
            for process in table.values()
            if process.parent_pid == os.getpid() and process.pid not in living
        ]
        if not orphans:
            return
        for pid in orphans:
            processes.kill_tree(pid, table)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        await asyncio.sleep(0.02)
