"""A fake daemon per test, and a host whose folders are the test's own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fuse_cache.client.client import Client
from fuse_cache.client.options import CompileOptions
from fuse_cache.proto.signing import SigningKey
from fuse_cache.proto.trust import open_trust_folder
from tests.fakes import FakeDaemon, serving

MakeClient = Callable[..., Client]


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the test out of the user's folders and settings."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FUSE_CACHE_TRUST_DIR", str(tmp_path / "trust"))
    for name in ("FUSE_CACHE_ENDPOINT", "FUSE_CACHE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    logging.getLogger("fuse_cache.client").setLevel(logging.WARNING)


@pytest.fixture
def signing_key() -> SigningKey:
    """The key that the host trusts by its trust folder."""
    return open_trust_folder(create=True).signing_key()


@pytest.fixture
def daemon(signing_key: SigningKey) -> FakeDaemon:
    """A fake daemon, not serving yet."""
    return FakeDaemon(signing_key)


@pytest.fixture
def endpoint(daemon: FakeDaemon, tmp_path: Path) -> Iterator[str]:
    """Where the fake daemon serves."""
    with serving(daemon, f"unix:{tmp_path}/fake.sock") as address:
        yield address


@pytest.fixture
def make_client(tmp_path: Path) -> Iterator[MakeClient]:
    """Return a function that makes a client, with a cache folder per name: another name is another host."""
    made: list[Client] = []

    def make(endpoint: str | list[str], host: str = "host", **options: Any) -> Client:
        values = {"endpoint": endpoint, "cache_dir": str(tmp_path / host), **options}
        made.append(Client(CompileOptions.from_mapping(values)))
        return made[-1]

    yield make
    for client in made:
        client.close()
