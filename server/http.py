"""Three plain pages for probes and scrapers: /healthz, /readyz, /metrics.

Read-only, and no framework for three pages.
"""

from __future__ import annotations

import asyncio
from urllib.parse import parse_qs, urlsplit

from fuse_cache.server.config import split_address
from fuse_cache.server.listen import advice
from fuse_cache.server.metrics import CONTENT_TYPE, Metrics
from fuse_cache.server.status import Status

MAX_HEAD_BYTES = 8192
PATIENCE_S = 5.0
MAX_CONNECTIONS = 32  # A scraper and a few probes; more wait in the kernel's queue no longer than PATIENCE_S.


class HttpPages:
    """Serves the pages on one address."""

    def __init__(self, status: Status, metrics: Metrics) -> None:
        self._status = status
        self._metrics = metrics
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._server: asyncio.Server | None = None

    async def start(self, address: str) -> int:
        """Listen, and return the port. Raises: OSError, with what to do about it."""
        host, port = split_address(address)
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_HEAD_BYTES)
        except OSError as error:
            raise OSError(f"cannot listen on {address}: {advice(error, '--http')}") from error
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S), self._slots:
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # Whoever asked has gone, is too slow, or speaks something else.
        finally:
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3 or words[0] not in ("GET", "HEAD"):
            return _response(405, "only GET is answered here\n")
        try:
            url = urlsplit(words[1])
        except ValueError:
            return _response(400, "that is no address\n")
        with_body = words[0] == "GET"
        if url.path == "/healthz":
            return _response(200, "alive\n", with_body=with_body)
        if url.path == "/readyz":
            query = parse_qs(url.query, keep_blank_values=True)
            ready = self._status.can_compile if "compile" in query else not self._status.draining
            text = "\n".join([self._status.name(), *self._status.problems()]) + "\n"
            return _response(200 if ready else 503, text, with_body=with_body)
        if url.path == "/metrics":
            text = self._metrics.render().decode()
            return _response(200, text, with_body=with_body, content_type=CONTENT_TYPE)
        return _response(404, "pages: /healthz /readyz /readyz?compile /metrics\n", with_body=with_body)


def _response(
    code: int, text: str, *, with_body: bool = True, content_type: str = "text/plain; charset=utf-8"
) -> bytes:
    reason = {
        200: "OK",
        400: "Bad Request",
        404: "Not Found",
        405: "Method Not Allowed",
        503: "Service Unavailable",
    }[code]
    body = text.encode()
    head = (
        f"HTTP/1.1 {code} {reason}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        "X-Content-Type-Options: nosniff\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")
