"""What Linux offers to keep a tree of processes together, and the packets that two of ours exchange.

No policy here.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import json
import os
import signal
import socket
from collections.abc import Iterable
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MAX_PACKET_BYTES = 65536  # Far below the 208 KiB that a socket buffer holds by default.


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    Exits at once if that was already.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def become_subreaper() -> None:
    """Make orphans among this process's descendants its own children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


@dataclass(frozen=True, slots=True)
class Process:
    """One line of the process table. Its numbers are of the moment it was read."""

    pid: int
    parent_pid: int
    resident_bytes: int


def process_table() -> dict[int, Process]:
    """Read every process of this machine (or container) that we may see: one small file each."""
    table: dict[int, Process] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The command name, in brackets, may hold anything; what follows the last bracket may not.
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # It ended meanwhile.
        table[int(name)] = Process(int(name), int(fields[1]), int(fields[21]) * _PAGE_BYTES)
    return table


def tree_of(root_pid: int, table: dict[int, Process]) -> list[Process]:
    """Return `root_pid` and its descendants, as far as they are in `table`."""
    children: dict[int, list[Process]] = {}
    for process in table.values():
        children.setdefault(process.parent_pid, []).append(process)
    found = [table[root_pid]] if root_pid in table else []
    for process in found:
        found.extend(children.get(process.pid, ()))
    return found


def kill_tree(root_pid: int, table: dict[int, Process] | None = None) -> None:
    """Kill a process, its process group and all its descendants.

    The caller must not have reaped `root_pid` yet.
    """
    for process in tree_of(root_pid, process_table() if table is None else table):
        kill_quietly(process.pid)
    kill_group(root_pid)
    kill_quietly(root_pid)


def kill_group(leader_pid: int) -> None:
    """Kill a whole process group; one that is gone is fine."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader_pid, signal.SIGKILL)


def kill_quietly(pid: int, signal_number: int = signal.SIGKILL) -> None:
    """Send a signal; a process that is gone is fine."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal_number)


def spawn(argv: list[str], actions: list[tuple[int, int, int]], defaults: Iterable[int]) -> int:
    """Start a program in a session of its own, with the `defaults` signals not ignored; return its pid."""
    return os.posix_spawn(argv[0], argv, os.environ, file_actions=actions, setsid=True, setsigdef=defaults)


def next_exit() -> tuple[int, int] | None:
    """Reap one child that has ended, after killing what is left of its process group. None: nobody has ended.

    Returns its pid and its exit code (negative: the signal). The group is killed while the dead leader still
    holds
    its number, so that no stranger can be hit.
    """
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if ended is None:
        return None
    kill_group(ended.si_pid)
    _, status = os.waitpid(ended.si_pid, 0)
    return ended.si_pid, os.waitstatus_to_exitcode(status)


def send_packet(sock: socket.socket, message: dict[str, object], descriptors: Iterable[int] = ()) -> None:
    """Send one packet over a SOCK_SEQPACKET socket, with file descriptors.

    Raises:
        OSError: the other side is gone, or (on a non-blocking socket) its buffer is full.
    """
    data = json.dumps(message).encode()
    if len(data) > MAX_PACKET_BYTES:
        raise ValueError(f"a packet has {len(data)} bytes, the limit is {MAX_PACKET_BYTES}")
    fds = array.array("i", descriptors)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds.tobytes())] if fds else []
    sock.sendmsg([data], ancillary)


def receive_packet(sock: socket.socket) -> tuple[dict[str, object], list[int]] | None:
    """Receive one packet and the descriptors with it. None: the other side is gone.

    Raises:
        BlockingIOError: the socket is non-blocking and nothing is there.
    """
    try:
        data, descriptors, _, _ = socket.recv_fds(sock, MAX_PACKET_BYTES, 4)
    except ConnectionError:
        return None
    if not data:
        return None
    message = json.loads(data)
    assert isinstance(message, dict)
    return message, descriptors
