"""The client's own tiers: bounded, whole or nothing, and no worse than none where the folder is no good."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fuse_cache.client.epochs import Epochs, Known
from fuse_cache.client.errors import ArtifactRejectedError
from fuse_cache.client.options import CompileOptions
from fuse_cache.client.tiers import DiskTier, MemoryTier
from fuse_cache.client.verify import Artifact, Checker, Want
from fuse_cache.proto.signing import SigningKey
from fuse_cache.proto.toolchain import local_toolchain
from tests.fakes import make_want, seal


def _checker(key: SigningKey) -> Checker:
    return Checker(options=CompileOptions(), toolchain=local_toolchain(), keys=frozenset({key.public_key}))


def _artifact(want: Want, key: SigningKey, size_bytes: int = 100) -> Artifact:
    content = os.urandom(size_bytes)
    signed = seal(want.fields, content, key)
    checker = _checker(key)
    return checker.content(signed, checker.manifest(signed, want), content)


def test_memory_is_bounded_in_bytes_and_drops_what_was_used_least_recently() -> None:
    key, tier = SigningKey.generate(), MemoryTier(250)
    wants = [make_want(bytes([n])) for n in range(3)]
    for want in wants[:2]:
        tier.put("e", want.request_digest, _artifact(want, key))
    assert tier.get("e", wants[0].request_digest) is not None
    tier.put("e", wants[2].request_digest, _artifact(wants[2], key))
    assert [tier.get("e", want.request_digest) is not None for want in wants] == [True, False, True]
    tier.put("e", wants[0].request_digest, _artifact(wants[0], key, 300))
    assert tier.get("e", wants[0].request_digest) is None
    assert tier.get("another epoch", wants[2].request_digest) is None


def test_disk_gives_back_what_was_put_and_nothing_under_another_scope(tmp_path: Path) -> None:
    key, want, tier = SigningKey.generate(), make_want(), DiskTier(tmp_path)
    artifact = _artifact(want, key)
    tier.put("e", want.request_digest, artifact)
    found = tier.get("e", want, lambda: _checker(key))
    assert found is not None
    assert found.content == artifact.content
    assert tier.get("another epoch", want, lambda: _checker(key)) is None
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


@pytest.mark.parametrize("damage", ["truncated", "one bit", "empty", "another's", "hostile pickle"])
def test_a_damaged_file_is_refused_removed_and_then_a_miss(damage: str, tmp_path: Path) -> None:
    key, want, tier = SigningKey.generate(), make_want(), DiskTier(tmp_path)
    tier.put("e", want.request_digest, _artifact(want, key))
    (path,) = tmp_path.rglob("*.fca")
    data = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(data[:-7])
    elif damage == "one bit":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "another's":
        other = make_want(b"another graph")
        tier.put("e", other.request_digest, _artifact(other, key))
        path.write_bytes(next(p for p in tmp_path.rglob("*.fca") if p != path).read_bytes())
    else:
        path.write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(ArtifactRejectedError):
        tier.get("e", want, lambda: _checker(key))
    assert not path.exists()
    assert tier.get("e", want, lambda: _checker(key)) is None


def test_a_pipe_in_an_artifacts_place_is_refused_and_nobody_waits_for_it(tmp_path: Path) -> None:
    key, want, tier = SigningKey.generate(), make_want(), DiskTier(tmp_path)
    tier.put("e", want.request_digest, _artifact(want, key))
    (path,) = tmp_path.rglob("*.fca")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ArtifactRejectedError):
        tier.get("e", want, lambda: _checker(key))
    assert not path.exists()


def test_what_others_could_have_written_of_recalls_is_not_believed(tmp_path: Path) -> None:
    def epochs() -> Epochs:
        return Epochs(tmp_path, CompileOptions(), local_toolchain())

    before = os.umask(0)
    try:
        epochs().heard(Known(epoch="e", revoked=("builder",)))
    finally:
        os.umask(before)
    known = epochs().last()
    assert known is not None
    assert known.revoked == ("builder",)
    (path,) = (tmp_path / "epochs").iterdir()
    path.chmod(0o646)
    assert epochs().last() is None


def test_a_file_signed_by_nobody_we_trust_is_refused(tmp_path: Path) -> None:
    key, want, tier = SigningKey.generate(), make_want(), DiskTier(tmp_path)
    tier.put("e", want.request_digest, _artifact(want, key))
    with pytest.raises(ArtifactRejectedError, match="not trusted"):
        tier.get("e", want, lambda: _checker(SigningKey.generate()))


def test_disk_is_bounded_and_drops_what_was_used_least_recently(tmp_path: Path) -> None:
    key, tier = SigningKey.generate(), DiskTier(tmp_path, 50_000)
    wants = [make_want(bytes([n])) for n in range(8)]
    for age, want in enumerate(wants):
        tier.put("e", want.request_digest, _artifact(want, key, 10_000))
        for path in tmp_path.rglob(f"{want.request_digest.hex()}.fca"):
            os.utime(path, (1000 + age, 1000 + age))
    files = list(tmp_path.rglob("*.fca"))
    assert sum(path.stat().st_size for path in files) <= 50_000
    assert tier.get("e", wants[-1], lambda: _checker(key)) is not None
    assert tier.get("e", wants[0], lambda: _checker(key)) is None


AS_NOBODY = """
import logging, os, sys
sys.path.insert(0, sys.argv[3])
# Before the change of user: an interpreter may well be installed where only its owner reads.
from fuse_cache.client.client import Client
from tests.fakes import make_want
from fuse_cache.proto.toolchain import local_toolchain
local_toolchain()
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
os.setgid(1000700000); os.setuid(1000700000)
client = Client({"endpoint": sys.argv[1], "cache_dir": sys.argv[2], "trusted_keys": [sys.argv[4]]})
for graph in (b"a graph", b"new graph 1", b"new graph 2"):
    (answer,) = client.obtain([make_want(graph)])
    print(answer.source, answer.error or "")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_a_uid_without_passwd_entry_or_home_hits_in_a_read_only_folder_of_anothers_files(
    tmp_path: Path,
) -> None:
    """Case 69, the client's part: hits are used, misses are fetched, one warning, no crash."""
    from tests.fakes import FakeDaemon, serving

    tmp_path.chmod(0o755)
    # Pytest's own folders, one more of them for each of several test processes, are closed to others.
    for parent in tmp_path.parents:
        if parent == Path(tempfile.gettempdir()):
            break
        parent.chmod(0o755)
    key = SigningKey.generate()
    daemon = FakeDaemon(key)
    folder = tmp_path / "shared"
    with serving(daemon, f"unix:{tmp_path}/d.sock") as address:
        os.chmod(tmp_path / "d.sock", 0o777)
        from fuse_cache.client.client import Client

        filler = Client({"endpoint": address, "cache_dir": str(folder), "trusted_keys": [key.public_key]})
        filler.obtain([make_want()])
        filler.close()
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        root = str(Path(__file__).parents[2])
        environment = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path / "missing"), "PYTHONSAFEPATH": "1"}
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, address, str(folder), root, key.public_key.hex()],
            capture_output=True, text=True, env=environment, cwd="/", timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith("WARNING")] == [
        "disk",
        "compiled",
        "compiled",
    ]
    assert sum("cannot be written" in line for line in lines) == 1
