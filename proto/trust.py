"""The trust folder: what all daemons and clients of one user on one machine share without any configuration.

It lies outside HOME, in `/run/user/<uid>/fuse-cache`, else in `<system temp>/fuse-cache-<uid>`, belongs to
that uid and is closed to others. It holds `signing.key`, made once by the first daemon, and `*.pub`: the
public keys that are trusted here, that of `signing.key` among them. A folder or file that somebody else could
have written is refused, never repaired.

A session's `/run/user` folder comes and goes, so public keys are read from every place that exists, while a
key is only made in the first. Nothing here needs the uid to have a name or a home.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fuse_cache.proto.errors import TrustError
from fuse_cache.proto.signing import KeyFileError, SigningKey, parse_public_key

__all__ = ["TrustError", "TrustFolder", "open_trust_folder"]

OVERRIDE: Final = "FUSE_CACHE_TRUST_DIR"
_KEY: Final = "signing.key"
_KEY_FILE_BYTES: Final = 1024  # a key file has 100
_MAX_KEYS: Final = 256  # public keys in one folder


@dataclass(frozen=True, slots=True)
class TrustFolder:
    """A trust folder, checked when it was opened and on every use. Safe for concurrent use."""

    path: Path
    elsewhere: tuple[Path, ...] = ()  # where a daemon of the same uid may have made its own; read only

    def signing_key(self) -> SigningKey:
        """Return the key that all daemons of this uid sign with, made if there is none. For daemons only.

        However many processes start at once, all get the same key.

        Raises:
            TrustError: the folder or the key in it is open to somebody else, or cannot be used.
        """
        with _opened(self.path) as folder:
            text = _read(folder, _KEY, secret=True)
            if text is None:
                _publish(folder, _KEY, SigningKey.generate().private_text(), 0o600)
                text = _read(folder, _KEY, secret=True)
            try:
                if text is None:
                    raise TrustError(f"{self.path / _KEY} vanished: something cleans this folder")
                key = SigningKey.from_text(text)
            except KeyFileError as error:
                raise TrustError(
                    f"{self.path / _KEY} is damaged ({error}): remove it, a new one is made"
                ) from error
            # Before anything is signed with it: a reader that sees an artifact then finds its key.
            _publish(folder, f"{key.builder}.pub", key.public_text(), 0o644)
            return key

    def trusted_keys(self) -> list[bytes]:
        """Return the public keys that are trusted here, 32 bytes each, sorted.

        Raises:
            TrustError: the folder could have been touched by somebody else.
        """
        keys = set(_public_keys(self.path))
        for path in self.elsewhere:
            try:
                keys.update(_public_keys(path))
            except TrustError:
                continue  # none, or somebody else's in a shared place: no source of trust, no reason to stop
        return sorted(keys)


def open_trust_folder(create: bool = True, environment: Mapping[str, str] = os.environ) -> TrustFolder:
    """Return this uid's trust folder, made if it is not there. With `create` false nothing is written.

    Raises:
        TrustError: it is not there, or others could write to it; the message says what to change.
    """
    places = _places(environment)
    refusals = []
    for path in places:
        try:
            if create:
                _create(path)
            with _opened(path):
                return TrustFolder(path, tuple(place for place in places if place != path))
        except TrustError as error:
            refusals.append(str(error))
    raise TrustError("; ".join(refusals) + f"; set {OVERRIDE} to a folder of your own with mode 0700")


def _places(environment: Mapping[str, str]) -> list[Path]:
    """Return where the folder may be, best first. TMPDIR comes last: processes of one user differ."""
    if environment.get(OVERRIDE):
        return [Path(environment[OVERRIDE])]
    uid = os.getuid()
    session = Path(f"/run/user/{uid}")
    places = [session / "fuse-cache"] if session.is_dir() else []
    for parent in ("/tmp", "/var/tmp", tempfile.gettempdir()):
        place = Path(parent) / f"fuse-cache-{uid}"
        if place not in places:
            places.append(place)
    return places


def _create(path: Path) -> None:
    try:
        parent = path.parent.stat()
        if parent.st_mode & stat.S_IWOTH and not parent.st_mode & stat.S_ISVTX:
            raise TrustError(f"{path.parent} lets anybody replace what is in it (no sticky bit)")
        path.mkdir(mode=0o700)
    except FileExistsError:
        return  # checked by `_opened`
    except OSError as error:
        raise TrustError(f"{path} cannot be made: {error.strerror}") from error


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Yield a descriptor of the folder, which stays that folder whatever happens to its name meanwhile."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise TrustError(f"{path} cannot be opened as a folder: {error.strerror}") from error
    try:
        found = os.fstat(folder)
        if found.st_uid != os.getuid():
            raise TrustError(f"{path} belongs to uid {found.st_uid}, not to {os.getuid()}")
        if found.st_mode & 0o077:
            raise TrustError(f"{path} is open to others (mode {found.st_mode & 0o777:o}): chmod 700 it")
        yield folder
    finally:
        os.close(folder)


def _read(folder: int, name: str, *, secret: bool) -> str | None:
    """Return the text of a file in the folder, or None when it is not there."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TrustError(f"{name} in the trust folder cannot be opened: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise TrustError(f"{name} in the trust folder is not a file of uid {os.getuid()}")
        if found.st_mode & (0o077 if secret else 0o022):
            raise TrustError(f"{name} in the trust folder is open to others (mode {found.st_mode & 0o777:o})")
        return file.read(_KEY_FILE_BYTES).decode("ascii", "replace")


def _publish(folder: int, name: str, text: str, mode: int) -> None:
    """Make `name` hold `text`, unless it is there already. A reader sees all of it or nothing."""
    temp = f".{name}.{secrets.token_hex(8)}"
    try:
        descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=folder)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(descriptor)  # a torn key after a power cut would lock every daemon of this uid out
            os.link(
                temp, name, src_dir_fd=folder, dst_dir_fd=folder
            )  # fails if it is there, as a rename would not
        finally:
            os.unlink(temp, dir_fd=folder)
    except FileExistsError:
        return
    except OSError as error:
        raise TrustError(f"the trust folder cannot be written: {error.strerror}") from error


def _public_keys(path: Path) -> list[bytes]:
    keys = []
    with _opened(path) as folder:
        names = sorted(
            name for name in os.listdir(folder) if name.endswith(".pub") and not name.startswith(".")
        )
        for name in names[:_MAX_KEYS]:
            text = _read(folder, name, secret=False)
            if text is None:
                continue  # removed between the listing and now
            try:
                keys.append(parse_public_key(text))
            except KeyFileError:
                continue  # a damaged key makes nothing trusted
    return keys
