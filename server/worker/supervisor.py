"""The supervisor: the one parent of every process that the daemon needs. Started before gRPC, it never loads
torch.

A process that served gRPC must not fork, so the daemon asks this one. It keeps a fork server loaded and gives
it jobs, starts tools (the validator, the fingerprint command), and holds each to its limits: time, and memory
of the whole tree, read from the process table. Whatever ends, ends with its process group and its
descendants; when the daemon is gone, so is everything below here.

Packets (SOCK_SEQPACKET, JSON). From the daemon, descriptors in brackets:
    {"op": "job", "id", "dir", "seconds", "bytes"} [progress pipe]    {"op": "kill", "id"}
    {"op": "tool", "id", "argv", "seconds"} [stdin and stdout]        {"op": "reload"}: the first one loads
    {"op": "ping"}: answered with a pong
To the daemon:
    {"event": "pong"}
    {"event": "ready"}    {"event": "loading"}    {"event": "not_ready", "message"}
    {"event": "started", "id", "pid"}
    {"event": "ended", "id", "code", "why"}   why: "" (by itself), "time", "memory", "asked", "not_ready"
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import cast

from fuse_cache.server.worker import processes

# How often limits are checked: 10 GB/s of page faults is beyond one core, so 1 GB at most slips by.
TICK_S = 0.1
# A loaded fork server forks in 10 ms and tells of an end as fast. One that does not is replaced; all its jobs
# die with it.
FORK_PATIENCE_S = 15.0
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.5, 30.0  # Between two starts of a fork server that will not load.


@dataclass(slots=True)
class _Template:
    """A fork server."""

    pid: int
    control: socket.socket
    ready: bool = False
    retired: bool = False


@dataclass(slots=True)
class _Task:
    """A job or a tool. `pid` 0: its fork was asked for and has not happened yet."""

    pid: int
    seconds: float | None
    max_bytes: int | None
    since_s: float
    template: _Template | None = None  # None: a tool, our own child.
    why: str = ""
    over_since_s: float | None = None  # When it was seen to have ended, or was killed.


class Supervisor:
    """The state and the loop of the supervisor process."""

    def __init__(self, daemon: socket.socket, entry: str) -> None:
        self._daemon = daemon
        self._entry = entry
        self._tasks: dict[str, _Task] = {}
        # Several while retired ones finish their jobs; the last is current.
        self._templates: list[_Template] = []
        self._backoff_s = FIRST_BACKOFF_S
        self._restart_at_s: float | None = None
        self._selector = selectors.DefaultSelector()
        self._sweep_at_s: float | None = None

    def serve(self) -> None:
        """Run until the daemon closes its end, then take everything down."""
        wakeup_read, wakeup_write = os.pipe()
        for fd in (wakeup_read, wakeup_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._daemon, selectors.EVENT_READ)
        self._selector.register(wakeup_read, selectors.EVENT_READ)
        alive = True
        while alive:
            for key, _ in self._selector.select(self._wait_s()):
                if key.fileobj is self._daemon:
                    alive = self._hear_daemon()
                elif key.fileobj == wakeup_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wakeup_read, 4096)
                else:
                    self._hear_template(key.data)
            self._reap()
            self._tick()
        for process in processes.tree_of(os.getpid(), processes.process_table())[1:]:
            processes.kill_quietly(process.pid)

    def _wait_s(self) -> float | None:
        if self._tasks or self._sweep_at_s is not None:
            return TICK_S
        if self._restart_at_s is not None:
            return max(0.0, self._restart_at_s - time.monotonic())
        return None

    def _tell(self, **message: object) -> None:
        # A daemon that is gone is noticed by the read side.
        with contextlib.suppress(OSError):
            processes.send_packet(self._daemon, message)

    def _spawn(self, argv: list[str], stdio_fd: int) -> int:
        actions = [(os.POSIX_SPAWN_DUP2, stdio_fd, 0), (os.POSIX_SPAWN_DUP2, stdio_fd, 1)]
        return processes.spawn(argv, actions, _DAEMONS_SIGNALS)

    def _start_template(self) -> None:
        self._restart_at_s = None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        module = "fuse_cache.server.worker.forkserver"
        argv = [sys.executable, "-P", "-m", module, "--entry", self._entry, "--parent", str(os.getpid())]
        actions = [(os.POSIX_SPAWN_DUP2, theirs.fileno(), 0), (os.POSIX_SPAWN_DUP2, 2, 1)]
        pid = processes.spawn(argv, actions, _DAEMONS_SIGNALS)
        theirs.close()
        template = _Template(pid, ours)
        self._templates.append(template)
        self._selector.register(ours, selectors.EVENT_READ, template)

    def _hear_daemon(self) -> bool:
        received = processes.receive_packet(self._daemon)
        if received is None:
            return False
        message, descriptors = received
        op, task_id = message["op"], str(message.get("id", ""))
        if op == "job":
            self._start_job(task_id, message, descriptors)
        elif op == "tool":
            argv = [str(word) for word in cast(list[object], message["argv"])]
            pid = self._spawn(argv, descriptors[0])
            self._tasks[task_id] = _Task(pid, _float(message["seconds"]), None, time.monotonic())
            self._tell(event="started", id=task_id, pid=pid)
        elif op == "kill":
            self._kill(task_id, "asked")
        elif op == "ping":
            self._tell(event="pong")
        elif op == "reload":
            for template in self._templates:
                self._retire(template)
            self._backoff_s = FIRST_BACKOFF_S
            self._start_template()
        for fd in descriptors:
            os.close(fd)
        return True

    def _retire(self, template: _Template) -> None:
        template.retired = True
        with contextlib.suppress(OSError):  # It has died; its exit is about to be reaped.
            processes.send_packet(template.control, {"op": "retire"})

    def _start_job(self, task_id: str, message: dict[str, object], descriptors: list[int]) -> None:
        template = next((t for t in reversed(self._templates) if t.ready and not t.retired), None)
        if template is not None:
            with contextlib.suppress(OSError):
                order: dict[str, object] = {"op": "fork", "id": task_id, "dir": message["dir"]}
                processes.send_packet(template.control, order, descriptors)
                limits = _float(message["seconds"]), _int(message["bytes"])
                self._tasks[task_id] = _Task(0, *limits, time.monotonic(), template)
                return
        self._tell(event="ended", id=task_id, code=-1, why="not_ready")

    def _hear_template(self, template: _Template) -> None:
        received = processes.receive_packet(template.control)
        if received is None:
            self._selector.unregister(template.control)
            template.control.close()
            return  # Its exit is reaped apart.
        message = received[0]
        event, task_id = message["event"], str(message.get("id", ""))
        if event == "ready":
            template.ready = True
            if not template.retired:
                self._backoff_s = FIRST_BACKOFF_S
                self._tell(event="ready")
        elif event == "failed":
            self._tell(event="not_ready", message=message["message"])
        elif event == "started" and task_id in self._tasks:
            task = self._tasks[task_id]
            task.pid, task.since_s = _int(message["pid"]) or 0, time.monotonic()
            self._tell(event="started", id=task_id, pid=task.pid)
            if task.why:
                processes.kill_tree(task.pid)
        elif event == "ended":
            self._end(task_id, _int(message["code"]) or 0)

    def _end(self, task_id: str, code: int) -> None:
        task = self._tasks.pop(task_id, None)
        if task is not None:
            self._sweep()
            self._tell(event="ended", id=task_id, code=code, why=task.why)

    def _reap(self) -> None:
        while (ended := processes.next_exit()) is not None:
            pid, code = ended
            for template in [t for t in self._templates if t.pid == pid]:
                self._bury(template, code)
            # A job's process is ours only when its fork server has died; then the kernel has killed it too.
            for task_id in [i for i, task in self._tasks.items() if task.pid == pid]:
                self._end(task_id, code)

    def _bury(self, template: _Template, code: int) -> None:
        while template.control.fileno() >= 0:  # What it said last comes before its death does.
            self._hear_template(template)
        was_current = template is self._templates[-1]
        self._templates.remove(template)
        for task_id in [i for i, task in self._tasks.items() if task.template is template and task.pid == 0]:
            self._end(task_id, code)
        if was_current:
            # One that had been loaded is loaded again; one that died loading may never load.
            event = "loading" if template.ready else "not_ready"
            self._tell(event=event, message=f"the fork server ended with status {code}")
            self._restart_at_s = time.monotonic() + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, LAST_BACKOFF_S)

    def _kill(self, task_id: str, why: str, table: dict[int, processes.Process] | None = None) -> None:
        task = self._tasks.get(task_id)
        if task is None:
            return
        task.why = task.why or why
        if task.pid:
            processes.kill_tree(task.pid, table)

    def _tick(self) -> None:
        now_s = time.monotonic()
        if self._restart_at_s is not None and now_s >= self._restart_at_s:
            self._start_template()
        if self._sweep_at_s is not None and now_s >= self._sweep_at_s:
            self._sweep_at_s = None
            self._sweep()
        watched = [item for item in self._tasks.items() if item[1].max_bytes is not None and item[1].pid]
        table = processes.process_table() if watched else {}
        for task_id, task in watched:
            resident = sum(process.resident_bytes for process in processes.tree_of(task.pid, table))
            if task.max_bytes is not None and resident > task.max_bytes:
                self._kill(task_id, "memory", table)
            if task.over_since_s is None and (task.why or not resident):  # The dead hold no memory.
                task.over_since_s = now_s
        for task_id, task in list(self._tasks.items()):
            age_s = now_s - task.since_s
            awaited_since_s = task.over_since_s if task.pid else task.since_s
            awaited_s = 0.0 if awaited_since_s is None else now_s - awaited_since_s
            if task.template is not None and awaited_s > FORK_PATIENCE_S:
                processes.kill_quietly(task.template.pid)
            elif task.pid and not awaited_s and task.seconds is not None and age_s > task.seconds:
                self._kill(task_id, "time")

    def _sweep(self) -> None:
        """Kill what a dead worker left behind: as a subreaper we are the parent of its orphans."""
        known = {task.pid for task in self._tasks.values()} | {template.pid for template in self._templates}
        table = processes.process_table()
        for process in table.values():
            if process.parent_pid == os.getpid() and process.pid not in known:
                processes.kill_tree(process.pid, table)
                self._sweep_at_s = time.monotonic() + TICK_S  # Its own children come to us next.


_DAEMONS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _float(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _int(value: object) -> int | None:
    return value if isinstance(value, int) else None


def main(arguments: list[str] | None = None) -> int:
    """Serve the daemon at the other end of standard input."""
    parser = argparse.ArgumentParser(prog="python -m fuse_cache.server.worker.supervisor")
    parser.add_argument("--entry", required=True, help="module:function of the build")
    parser.add_argument("--parent", type=int, required=True, help="pid of the daemon")
    options = parser.parse_args(arguments)
    # Not die_with_parent: our end must come after that of all below, and the closed socket tells us anyway.
    for number in _DAEMONS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # Meant for the daemon: it drains and then closes the socket.
    processes.become_subreaper()
    daemon = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    if os.getppid() == options.parent:
        Supervisor(daemon, options.entry).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
