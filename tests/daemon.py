"""A real daemon for tests: `fuse-cache serve` as a process of its own, in a folder of the test's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, "-c", "from fuse_cache.client.cli import main; main()")
# Loaded test machines take several seconds to import torch; whoever waits longer than this found a hang.
READY_S = 240.0


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_cli(*arguments: str, env: Mapping[str, str] | None = None, check: bool = True) -> str:
    """Run `fuse-cache ARGUMENTS` in a process of its own and return what it printed."""
    done = subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
        timeout=120,
        check=False,
    )
    if check and done.returncode:
        raise AssertionError(
            f"fuse-cache {' '.join(arguments)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


class Daemon:
    """One running daemon. `folder` holds its store, socket, log and trust folder."""

    def __init__(
        self, folder: Path, *arguments: str, env: Mapping[str, str] | None = None, listen: str = ""
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.store = folder / "store"
        self.endpoint = listen or f"unix:{folder / 'daemon.sock'}"
        self.http_port = free_port()
        self.log_path = folder / "daemon.log"
        self.env = {"FUSE_CACHE_TRUST_DIR": str(folder / "trust"), **(env or {})}
        self.arguments = arguments
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, wait: bool = True) -> Daemon:
        """Start the process and, unless told otherwise, wait until it compiles."""
        log = self.log_path.open("ab")
        self.process = subprocess.Popen(
            [
                *COMMAND, "serve", "--listen", self.endpoint, "--http", f"127.0.0.1:{self.http_port}",
                "--store", str(self.store), *self.arguments,
            ],
            stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env={**os.environ, **self.env},
        )  # fmt: skip
        log.close()
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self) -> None:
        """Wait until /readyz answers 200, or fail with the daemon's log."""
        import urllib.error
        import urllib.request

        assert self.process is not None
        page = f"http://127.0.0.1:{self.http_port}/readyz?compile"
        end = time.monotonic() + READY_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            with (
                contextlib.suppress(OSError, urllib.error.URLError),
                urllib.request.urlopen(page, timeout=2) as answer,
            ):
                if answer.status == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(f"the daemon is not ready\n{self.log()}")

    def log(self) -> str:
        """Return what the daemon has logged so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def stats(self) -> dict[str, Any]:
        """Return `fuse-cache stats --json`."""
        answer: dict[str, Any] = json.loads(
            run_cli("stats", "--endpoint", self.endpoint, "--json", env=self.env)
        )
        return answer

    def entries(self) -> list[dict[str, Any]]:
        """Return `fuse-cache ls --json`."""
        answer: list[dict[str, Any]] = json.loads(
            run_cli("ls", "--endpoint", self.endpoint, "--json", env=self.env)
        )
        return answer

    def stop(self, *, timeout_s: float = 30.0) -> int:
        """Send SIGTERM, wait, and return the exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the daemon ignored SIGTERM for {timeout_s} s\n{self.log()}") from None

    def kill(self) -> None:
        """Send SIGKILL and wait."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def running_daemon(
    folder: Path, *arguments: str, env: Mapping[str, str] | None = None, listen: str = ""
) -> Iterator[Daemon]:
    """Run a daemon for the length of a block."""
    daemon = Daemon(folder, *arguments, env=env, listen=listen)
    try:
        yield daemon.start()  # One that is not ready in time is stopped as well.
    finally:
        if daemon.process is not None and daemon.process.poll() is None:
            daemon.stop()
