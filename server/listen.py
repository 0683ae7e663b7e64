"""Addresses: TCP and Unix sockets, stale ones of dead daemons, none shared by accident."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import grpc.aio

from fuse_cache.server.config import split_address


def bind(server: grpc.aio.Server, address: str) -> str:
    """Listen on one address and return it, with the port that was chosen for port 0. Raises: OSError."""
    try:
        if address.startswith("unix:"):
            path = Path(address.removeprefix("unix:"))
            if not path.parent.is_dir():
                raise OSError(
                    f"cannot listen on {address}: {path.parent} is no folder; make it, or name another"
                )
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
        raise OSError(f"cannot listen on {address}: {_why_not(address)}") from error


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
    raise OSError(
        f"cannot listen on unix:{path}: a daemon already does; stop it, or give --listen another path"
    )


def _why_not(address: str) -> str:
    """Ask the system, since gRPC does not tell, and say what to do about it."""
    if address.startswith("unix:"):
        return "its folder may not be written; give --listen a path in a folder of your own"
    host, port = split_address(address)
    try:
        family, kind, number, _, name = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, number) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(name)
    except OSError as error:
        return advice(error, "--listen")
    return "it was in use a moment ago; try again"


def advice(error: OSError, option: str) -> str:
    """Return why an address of TCP cannot be listened on, and what to do about it."""
    if error.errno == errno.EADDRINUSE:
        return f"another process listens there; stop it (`ss -ltnp` shows it), or give {option} another port"
    if error.errno == errno.EACCES:
        return f"ports below 1024 are the system's; give {option} a higher one"
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return f"it is no address of this machine; give {option} one that is, or 0.0.0.0 for all"
    return f"{error.strerror}; give {option} another address"
