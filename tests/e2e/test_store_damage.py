"""A store whose files are swapped, damaged, read-only or without room: a counted miss, a right answer."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fuse_cache.client.client import Obtained
from fuse_cache.server.cache.entry_file import encode_header, read_entry
from fuse_cache.server.cache.tier import Space
from tests.daemon import Daemon, running_daemon
from tests.e2e.conftest import MakeClient
from tests.e2e.mount import mounted
from tests.e2e.small import silu_graph

NUMBERS = (1, 2)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, trust_dir: Path) -> Iterator[Daemon]:
    """A daemon that is restarted: only then does it read from its disk what it has in memory."""
    env = {"FUSE_CACHE_TRUST_DIR": str(trust_dir)}
    with running_daemon(tmp_path_factory.mktemp("damage"), "--workers", "2", env=env) as running:
        yield running


def _obtain(daemon: Daemon, make_client: MakeClient, host: str, namespace: str) -> list[Obtained]:
    """Ask for both graphs, and hold what comes against eager."""
    answers = make_client(daemon, host=host, namespace=namespace).obtain(
        [silu_graph(number).want() for number in NUMBERS]
    )
    for number, answer in zip(NUMBERS, answers, strict=True):
        assert answer.artifact is not None, answer.error
        assert silu_graph(number).difference(answer.artifact) <= 1e-5
    return answers


def _keys(answers: list[Obtained]) -> list[bytes]:
    return [answer.artifact.manifest.key for answer in answers if answer.artifact is not None]


def _file(daemon: Daemon, space: Space, name: bytes) -> Path:
    folder = "manifest" if space is Space.MANIFEST else "content"
    return daemon.store / folder / name.hex()[:2] / name.hex()


def _restart(daemon: Daemon) -> None:
    daemon.stop()
    daemon.start()


def _corrupt(daemon: Daemon) -> int:
    lookups: dict[str, Any] = daemon.stats()["lookups"]
    return sum(counts["corrupt"] for counts in lookups.values())


def test_signed_entries_swapped_in_the_daemons_store_are_refused_and_recompiled(
    daemon: Daemon, make_client: MakeClient
) -> None:
    keys = _keys(_obtain(daemon, make_client, "before", "swapped"))
    paths = [_file(daemon, Space.MANIFEST, key) for key in keys]
    entries = []
    for key, path in zip(keys, paths, strict=True):
        with path.open("rb") as file:
            entries.append(read_entry(file, Space.MANIFEST, key, "disk"))
    daemon.stop()
    for key, path, entry in zip(keys, paths, reversed(entries), strict=True):
        # Whole files, each valid in itself and signed by a builder that all trust.
        path.write_bytes(encode_header(Space.MANIFEST, key, entry) + entry.data)
    daemon.start()
    answers = _obtain(daemon, make_client, "after", "swapped")
    assert [answer.source for answer in answers] == ["compiled", "compiled"]
    assert _keys(answers) == keys
    assert _corrupt(daemon) >= 2
    again = _obtain(daemon, make_client, "later", "swapped")
    assert [answer.source for answer in again] == ["daemon", "daemon"]


def test_signed_entries_swapped_in_a_hosts_own_disk_tier_are_refused(
    daemon: Daemon, make_client: MakeClient, tmp_path: Path
) -> None:
    _obtain(daemon, make_client, "own", "swapped")
    first, second = sorted((tmp_path / "own").rglob("*.fca"))
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    answers = _obtain(daemon, make_client, "own", "swapped")
    assert [answer.source for answer in answers] == ["daemon", "daemon"]
    assert [[error.verdict for error in answer.rejected] for answer in answers] == [["WRONG_MANIFEST"]] * 2
    healed = _obtain(daemon, make_client, "own", "swapped")
    assert [answer.source for answer in healed] == ["disk", "disk"]


def test_corrupted_and_truncated_artifacts_are_misses_counted_and_recompiled(
    daemon: Daemon, make_client: MakeClient
) -> None:
    before = _obtain(daemon, make_client, "before", "swapped")
    digests = [a.artifact.manifest.content.digest for a in before if a.artifact is not None]
    daemon.stop()
    flipped, cut = (_file(daemon, Space.CONTENT, digest) for digest in digests)
    data = bytearray(flipped.read_bytes())
    data[-100] ^= 4
    flipped.write_bytes(data)
    with cut.open("r+b") as file:
        file.truncate(cut.stat().st_size // 2)
    daemon.start()
    after = _obtain(daemon, make_client, "after", "swapped")
    assert [answer.source for answer in after] == ["compiled", "compiled"]
    assert _corrupt(daemon) == 2
    later = _obtain(daemon, make_client, "later", "swapped")
    assert [answer.source for answer in later] == ["daemon", "daemon"]


@pytest.mark.slow
def test_a_read_only_store_serves_hits_and_compiles_misses(daemon: Daemon, make_client: MakeClient) -> None:
    _obtain(daemon, make_client, "before", "swapped")
    daemon.stop()
    entries = sorted(path for path in daemon.store.rglob("*") if path.parent.parent.name == "manifest")
    with mounted(daemon.store, "--bind", str(daemon.store)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(daemon.store)], check=True)
        daemon.start()
        hits = _obtain(daemon, make_client, "hits", "swapped")
        assert [answer.source for answer in hits] == ["daemon", "daemon"]
        misses = _obtain(daemon, make_client, "misses", "read-only-new")
        assert [answer.source for answer in misses] == ["compiled", "compiled"]
        assert daemon.stats()["status"] == "DEGRADED"
        daemon.stop()
    assert entries == sorted(p for p in daemon.store.rglob("*") if p.parent.parent.name == "manifest")
    daemon.start()


@pytest.mark.slow
def test_a_full_disk_costs_the_write_and_not_the_answer(
    make_client: MakeClient, tmp_path: Path, trust_dir: Path
) -> None:
    store = tmp_path / "full" / "store"
    store.mkdir(parents=True)
    with mounted(store, "-t", "tmpfs", "-o", "size=256k", "tmpfs"):
        (store / "ballast").write_bytes(bytes(200 * 1024))
        env = {"FUSE_CACHE_TRUST_DIR": str(trust_dir)}
        with running_daemon(tmp_path / "full", "--workers", "2", env=env) as full:
            with contextlib.suppress(OSError), (store / "more").open("wb") as file:
                while True:  # Whatever the daemon left.
                    file.write(bytes(512))
                    file.flush()
            answers = _obtain(full, make_client, "first", "full")
            assert [answer.source for answer in answers] == ["compiled", "compiled"]
            second = _obtain(full, make_client, "second", "full")  # Memory has them.
            assert [answer.source for answer in second] == ["daemon", "daemon"]
            for name in ("ballast", "more"):
                (store / name).unlink()
            third = _obtain(full, make_client, "third", "full-no-more")
            assert [answer.source for answer in third] == ["compiled", "compiled"]
            assert len([entry for entry in full.entries() if entry["namespace"] == "full-no-more"]) == 2
