"""Addresses: TCP and Unix sockets, stale ones of dead daemons, none shared by accident."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import grpc.aio


def bind(server: grpc.aio.Server, address: str) -> str:
    """Listen on one address and return it, with the port that was chosen for port 0. Raises: OSError."""
    try:
        if address.startswith("unix:"):
            path = Path(address.removeprefix("unix:"))
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_stale_socket(path)
            before = os.umask(0o177)  # Only this user may connect, from the very first moment.
            try:
                server.add_insecure_port(address)
            finally:
                os.umask(before)
            return address
        host, _, _ = address.rpartition(":")
        return f"{host}:{server.add_insecure_port(address)}"
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: is it in use, or not this machine's?") from error


def _remove_stale_socket(path: Path) -> None:
    """Remove the socket of a daemon that died; leave that of one that lives."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise OSError(f"a daemon already listens on unix:{path}")
