"""The daemon's end of the validator process: one graph at a time, bounded in time, restarted when it dies."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

from fuse_cache.server.errors import InvalidRequestError, UnavailableError
from fuse_cache.server.worker import processes
from fuse_cache.server.worker.link import SupervisorLink

CHECK_S = 10.0  # 0.1 s for the largest graph seen; 131,072 nodes take 3.
START_S = 30.0
MODULE = "fuse_cache.server.worker.validator"


class ValidatorGaveUpError(InvalidRequestError):
    """The validator died of a graph, or took too long: refused, and not remembered. It may have been the
    machine's fault.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What the validator says of a good graph."""

    nodes: int
    inputs: int
    symbols: int
    level: int
    custom_ops: tuple[str, ...]


class GraphChecker:
    """Asks the validator process. A graph that it dies of is refused; the next one finds a new process."""

    def __init__(self, link: SupervisorLink, *, extra_arguments: tuple[str, ...] = ()) -> None:
        self._link = link
        self._extra_arguments = extra_arguments
        self._lock = asyncio.Lock()  # Guards _socket and the one question that may be under way.
        self._socket: socket.socket | None = None
        self._tool_id = ""

    async def start(self) -> None:
        """Have a process ready before the first graph comes."""
        async with self._lock:
            await self._ensure()

    async def check(self, graph: Path) -> Checked:
        """Decode and re-encode the graph in this file.

        Raises:
            InvalidRequestError: it is not a graph that may be compiled; the reason says why.
            UnavailableError: there is no validator.
        """
        async with self._lock:
            # Once more with a new process: the first may have died of anything, the second died of the graph.
            answer = await self._ask_once(graph) or await self._ask_once(graph)
        if answer is None:
            raise ValidatorGaveUpError("GRAPH_MALFORMED", "the validator died of this graph")
        if "reason" in answer:
            raise InvalidRequestError(str(answer["reason"]), str(answer["message"]))
        custom_ops = answer["custom_ops"]
        assert isinstance(custom_ops, list)
        numbers = {name: int(str(answer[name])) for name in ("nodes", "inputs", "symbols", "level")}
        return Checked(custom_ops=tuple(str(name) for name in custom_ops), **numbers)

    def close(self) -> None:
        """Let the process go."""
        self._drop()

    async def _ask_once(self, graph: Path) -> dict[str, object] | None:
        """Return the answer, or None when the process died over it."""
        sock = await self._ensure()
        try:
            async with asyncio.timeout(CHECK_S):
                answer = await self._ask(sock, graph)
        except TimeoutError:
            self._drop()
            raise ValidatorGaveUpError(
                "GRAPH_TOO_LARGE", f"the graph takes more than {CHECK_S:g} s to check"
            ) from None
        except asyncio.CancelledError:
            self._drop()  # Its answer would be taken for that of the next graph.
            raise
        if answer is None:
            self._drop()
        return answer

    async def _ensure(self) -> socket.socket:
        if self._socket is None:
            await self._link.wait_up(START_S)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            self._tool_id = f"validator-{uuid.uuid4().hex[:8]}"
            parent = str(self._link.supervisor_pid)
            argv = [sys.executable, "-P", "-m", MODULE, "--parent", parent, *self._extra_arguments]
            with theirs:
                self._link.start_tool(self._tool_id, argv, theirs.fileno())
            self._socket = ours
            try:
                async with asyncio.timeout(START_S):
                    hello = await _receive(ours)
            except TimeoutError:
                hello = None
            except asyncio.CancelledError:
                self._drop()
                raise
            if hello is None:
                self._drop()
                raise UnavailableError("INTERNAL", "the graph validator does not start", retry_after_s=1.0)
        return self._socket

    async def _ask(self, sock: socket.socket, graph: Path) -> dict[str, object] | None:
        fd = os.open(graph, os.O_RDONLY | os.O_CLOEXEC)
        try:
            processes.send_packet(sock, {"id": graph.parent.name, "bytes": os.fstat(fd).st_size}, (fd,))
        except OSError:
            return None
        finally:
            os.close(fd)
        return await _receive(sock)

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self._link.kill(self._tool_id)


async def _receive(sock: socket.socket) -> dict[str, object] | None:
    """Wait for one packet; None: the other side is gone."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(sock, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sock)
    received = processes.receive_packet(sock)
    return None if received is None else received[0]
