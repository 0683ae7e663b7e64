"""One real daemon for the tests of this folder, and hosts that know its endpoint and its trust folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fuse_cache.client.client import Client
from fuse_cache.client.options import CompileOptions
from tests.daemon import Daemon, running_daemon

MakeClient = Callable[..., Client]


@pytest.fixture(scope="session")
def trust_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trust folder of this machine's user: of every daemon and host here."""
    return tmp_path_factory.mktemp("trust") / "trust"


@pytest.fixture(scope="session")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory, trust_dir: Path) -> Iterator[Daemon]:
    """A daemon that nobody stops. Tests keep apart by namespace."""
    env = {"FUSE_CACHE_TRUST_DIR": str(trust_dir)}
    with running_daemon(tmp_path_factory.mktemp("shared"), "--workers", "2", env=env) as running:
        yield running


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, trust_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the test out of the user's folders and settings."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FUSE_CACHE_TRUST_DIR", str(trust_dir))
    for name in ("FUSE_CACHE_ENDPOINT", "FUSE_CACHE_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def make_client(tmp_path: Path) -> Iterator[MakeClient]:
    """Return a function that makes a client of a daemon; another `host` has caches of its own."""
    made: list[Client] = []

    def make(daemon: Daemon, host: str = "host", **options: Any) -> Client:
        values = {"endpoint": daemon.endpoint, "mode": "remote", "cache_dir": str(tmp_path / host), **options}
        made.append(Client(CompileOptions.from_mapping(values)))
        return made[-1]

    yield make
    for client in made:
        client.close()
