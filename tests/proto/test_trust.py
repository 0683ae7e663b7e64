from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fuse_cache.proto.signing import SigningKey
from fuse_cache.proto.trust import OVERRIDE, TrustError, TrustFolder, open_trust_folder

# One process of a herd: waits for the others, then asks for the key.
HERD = """
import sys, time
from pathlib import Path
from fuse_cache.proto.trust import open_trust_folder
while not Path(sys.argv[1]).exists():
    time.sleep(0.001)
folder = open_trust_folder()
key = folder.signing_key()
print(key.builder, key.public_key in folder.trusted_keys())
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "trust"


def opened(place: Path, create: bool = True) -> TrustFolder:
    return open_trust_folder(create, {OVERRIDE: str(place)})


def test_one_key_is_made_and_trusted(place: Path) -> None:
    folder = opened(place)
    assert folder.trusted_keys() == []
    key = folder.signing_key()
    assert folder.trusted_keys() == [key.public_key]
    assert opened(place).signing_key().public_key == key.public_key
    assert place.stat().st_mode & 0o777 == 0o700
    assert (place / "signing.key").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in place.iterdir() if path.name.startswith(".")] == []


def test_all_processes_that_start_at_once_get_one_key(place: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    environment = {**os.environ, OVERRIDE: str(place)}
    herd = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", HERD, str(go)], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(6)
    ]
    go.touch()
    answers = [process.communicate(timeout=60)[0].split() for process in herd]
    assert [process.returncode for process in herd] == [0] * 6
    assert len({builder for builder, _ in answers}) == 1
    assert {trusted for _, trusted in answers} == {"True"}


def test_more_public_keys_can_be_put_there(place: Path) -> None:
    folder = opened(place)
    own, other = folder.signing_key(), SigningKey.generate()
    (place / "other.pub").write_text(other.public_text())
    (place / "damaged.pub").write_text("hello")
    (place / "notes.txt").write_text(SigningKey.generate().public_text())
    assert folder.trusted_keys() == sorted([own.public_key, other.public_key])


def test_without_create_nothing_is_written(place: Path) -> None:
    with pytest.raises(TrustError, match=OVERRIDE):
        opened(place, create=False)
    assert not place.exists()


def test_a_folder_open_to_others_is_refused(place: Path) -> None:
    folder = opened(place)
    for mode in (0o777, 0o750, 0o701):
        os.chmod(place, mode)
        for use in (lambda: opened(place), folder.signing_key, folder.trusted_keys):
            with pytest.raises(TrustError, match="chmod 700"):
                use()


def test_a_link_is_refused_even_to_a_good_folder(place: Path, tmp_path: Path) -> None:
    good = tmp_path / "good"
    opened(good).signing_key()
    place.symlink_to(good)
    with pytest.raises(TrustError):
        opened(place)


def test_a_file_where_the_folder_belongs_is_refused(place: Path) -> None:
    place.write_text("")
    with pytest.raises(TrustError):
        opened(place)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_refused(place: Path) -> None:
    folder = opened(place)
    folder.signing_key()
    os.chown(place, 12345, 12345)
    with pytest.raises(TrustError, match="belongs to uid 12345"):
        folder.trusted_keys()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_key_of_somebody_else_is_refused(place: Path) -> None:
    folder = opened(place)
    folder.signing_key()
    os.chown(place / "signing.key", 12345, 12345)
    with pytest.raises(TrustError, match="not a file of uid"):
        folder.signing_key()


def test_a_key_that_others_can_read_is_refused(place: Path) -> None:
    folder = opened(place)
    folder.signing_key()
    os.chmod(place / "signing.key", 0o644)
    with pytest.raises(TrustError, match="open to others"):
        folder.signing_key()


def test_a_public_key_that_others_can_write_is_refused(place: Path) -> None:
    folder = opened(place)
    folder.signing_key()
    (public,) = place.glob("*.pub")
    os.chmod(public, 0o666)
    with pytest.raises(TrustError, match="open to others"):
        folder.trusted_keys()


def test_links_and_pipes_in_the_folder_are_refused(place: Path, tmp_path: Path) -> None:
    folder = opened(place)
    elsewhere = tmp_path / "elsewhere.pub"
    elsewhere.write_text(SigningKey.generate().public_text())
    (place / "a.pub").symlink_to(elsewhere)
    with pytest.raises(TrustError):
        folder.trusted_keys()
    (place / "a.pub").unlink()
    os.mkfifo(place / "a.pub", 0o600)
    with pytest.raises(TrustError, match="not a file"):
        folder.trusted_keys()


def test_a_damaged_key_is_named_and_never_replaced(place: Path) -> None:
    folder = opened(place)
    folder.signing_key()
    (place / "signing.key").write_text("torn")
    with pytest.raises(TrustError, match="remove it"):
        folder.signing_key()
    assert (place / "signing.key").read_text() == "torn"


def test_a_folder_in_a_place_where_anybody_may_replace_it_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    os.chmod(shared, 0o777)
    with pytest.raises(TrustError, match="sticky"):
        opened(shared / "trust")
    os.chmod(shared, 0o1777)
    opened(shared / "trust").signing_key()


def test_keys_of_the_same_uid_elsewhere_are_trusted_and_bad_folders_skipped(
    tmp_path: Path,
) -> None:
    session, temporary, broken = tmp_path / "session", tmp_path / "temporary", tmp_path / "broken"
    first, second = opened(session).signing_key(), opened(temporary).signing_key()
    opened(broken).signing_key()
    os.chmod(broken, 0o777)
    folder = TrustFolder(session, (temporary, broken, tmp_path / "missing"))
    assert folder.trusted_keys() == sorted([first.public_key, second.public_key])
    assert folder.signing_key().public_key == first.public_key


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another uid")
def test_a_uid_without_a_name_or_a_home_has_a_folder() -> None:
    uid = 1_000_700_000
    with tempfile.TemporaryDirectory() as home_of_all:
        os.chmod(home_of_all, 0o1777)
        code = (
            f"import os; os.setgid({uid}); os.setuid({uid})\n"
            "from fuse_cache.proto.trust import open_trust_folder\n"
            "print(open_trust_folder().signing_key().builder)"
        )
        environment = {OVERRIDE: f"{home_of_all}/trust", "PATH": os.environ["PATH"]}
        done = subprocess.run(
            [sys.executable, "-P", "-c", "import fuse_cache.proto.trust\n" + code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert len(done.stdout.strip()) == 32
        assert os.stat(f"{home_of_all}/trust").st_uid == uid


def test_the_default_place_is_outside_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = open_trust_folder(True, {})
    assert not str(folder.path).startswith(str(tmp_path))
    assert str(os.getuid()) in str(folder.path)
