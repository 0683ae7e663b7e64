"""What the commands that talk to a daemon share: the endpoint, the stub, errors in words, output in two
forms."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import typer

from fuse_cache.client.channel import Endpoint
from fuse_cache.client.errors import DaemonRefusedError, DaemonUnavailableError, OptionError
from fuse_cache.client.forksafe import grpc
from fuse_cache.client.options import CompileOptions
from fuse_cache.client.settings import load_options
from fuse_cache.client.transport import error_reason
from fuse_cache.proto import admin_pb2_grpc, compile_pb2_grpc

EndpointOption = Annotated[
    str | None, typer.Option(help="HOST:PORT or unix:PATH of the daemon. Default: 127.0.0.1:7788.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
CALL_S = 30.0  # A person waits; a busy daemon still answers.
_T = TypeVar("_T")


class Connection:
    """A daemon as a command sees it."""

    def __init__(self, options: CompileOptions) -> None:
        self.options = options
        self._endpoint = Endpoint(options.endpoint[0], options)
        self.metadata = (("authorization", f"Bearer {options.token}"),) if options.token else ()

    @property
    def address(self) -> str:
        """Where it is."""
        return self._endpoint.address

    def admin(self) -> admin_pb2_grpc.AdminStub:
        """Return the stub for operators."""
        return admin_pb2_grpc.AdminStub(self._endpoint.channel())

    def compile(self) -> compile_pb2_grpc.CompileStub:
        """Return the stub that hosts use."""
        return compile_pb2_grpc.CompileStub(self._endpoint.channel())

    def await_life(self) -> None:
        """Wait for a sign of life. Errors as of `errors`."""
        self._endpoint.await_life()

    def call(self, method: Callable[..., _T], request: object, *, timeout_s: float = CALL_S) -> _T:
        """Make a unary call.

        Raises:
            DaemonUnavailableError, DaemonRefusedError
        """
        with self.errors():
            self._endpoint.await_life()
            return method(request, timeout=timeout_s, metadata=self.metadata)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Say in words what goes wrong with calls in the block."""
        try:
            yield
        except DaemonUnavailableError as error:
            raise DaemonUnavailableError(
                f"{error}. Start one with `fuse-cache serve`, or name another with --endpoint."
            ) from error
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""
            if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise DaemonUnavailableError(f"{self.address}: {details or code.name}") from error
            raise DaemonRefusedError(error_reason(error) or code.name, details) from error


def connect(endpoint: str | None) -> Connection:
    """Return the daemon to talk to: the option's, else the environment's or the file's."""
    # Commands wait for a busy machine longer than a host that has something else to do.
    values: dict[str, object] = {"mode": "remote"}
    if endpoint is not None:
        values["endpoint"] = endpoint
    return Connection(load_options(values))


def print_json(value: Any) -> None:
    """Print one JSON document."""
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


def key_prefix(text: str) -> str:
    """Return a key or the beginning of one as the daemon takes it.

    Raises:
        OptionError: it is none.
    """
    if not 8 <= len(text) <= 64 or not all(digit in "0123456789abcdef" for digit in text.lower()):
        raise OptionError(f"{text!r} is no key: give 8 to 64 hex digits, as `fuse-cache ls` shows them")
    return text.lower()
