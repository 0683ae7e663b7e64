"""Signatures over manifests. Whoever verifies brings his own list of keys: a manifest's word on its signer
proves nothing."""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3
from google.protobuf.message import DecodeError
from nacl.bindings import crypto_sign_open
from nacl.exceptions import CryptoError
from nacl.signing import SigningKey as Ed25519Key

from fuse_cache.proto.artifact_pb2 import Manifest, SignedManifest
from fuse_cache.proto.limits import MANIFEST_BYTES

MANIFEST_SCHEMA: Final = 1
PURPOSE_ARTIFACT: Final = "artifact"
PURPOSE_BYTECODE: Final = "bytecode"
SIGNATURE_BYTES: Final = 64
_CONTEXT: Final = b"fuse-cache manifest v1\0"
_PRIVATE: Final = "fuse-cache-ed25519-private"
_PUBLIC: Final = "fuse-cache-ed25519-public"


class SignatureErrorKind(enum.StrEnum):
    """Why a signed manifest is refused. Counted apart."""

    UNSIGNED = "unsigned"
    UNTRUSTED = "untrusted"  # by a key that is not on the reader's list, or not for this purpose
    REVOKED = "revoked"  # by a builder whose artifacts were recalled
    BAD = "bad"  # the signature does not fit, or the manifest is malformed


class SignatureError(ValueError):
    """The manifest must not be used. Nothing of it may be deserialised further."""

    def __init__(self, kind: SignatureErrorKind, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class KeyFileError(ValueError):
    """A key file cannot be read, or must not be used as it is."""


def builder_id(public_key: bytes) -> str:
    """Return the name of the builder with this public key: 32 hex digits."""
    return blake3(public_key).digest(length=16).hex()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustSet:
    """Which signers a reader accepts. Keys are 32 raw bytes."""

    keys: frozenset[bytes] = frozenset()  # for artifacts
    bytecode_keys: frozenset[bytes] = frozenset()  # for records that hold bytecode, and those only
    revoked: frozenset[str] = frozenset()  # builder ids
    allow_unsigned: bool = False  # artifacts only, never bytecode


class SigningKey:
    """A builder's key pair."""

    def __init__(self, private_key: Ed25519Key) -> None:
        self._private_key = private_key
        self.public_key = bytes(private_key.verify_key)
        self.builder = builder_id(self.public_key)

    def __repr__(self) -> str:
        return f"SigningKey(builder={self.builder})"

    @classmethod
    def generate(cls) -> SigningKey:
        """Return a new key pair."""
        return cls(Ed25519Key.generate())

    @classmethod
    def from_text(cls, text: str) -> SigningKey:
        """Return the key pair whose private text form this is.

        Raises:
            KeyFileError: it is none.
        """
        return cls(Ed25519Key(_parse(text, _PRIVATE)))

    def private_text(self) -> str:
        """Return the text form of the private key: a secret."""
        return f"{_PRIVATE} {bytes(self._private_key).hex()}\n"

    def public_text(self) -> str:
        """Return the text form of the public key."""
        return f"{_PUBLIC} {self.public_key.hex()}\n"

    @classmethod
    def load(cls, path: Path) -> SigningKey:
        """Read a private key file.

        Raises:
            KeyFileError: others may read it, or it is no key.
            OSError: it cannot be opened.
        """
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise KeyFileError(f"{path} can be read by others: chmod 600 it, and replace it if they did")
            return cls.from_text(file.read(1024).decode("ascii", "replace"))

    def save(self, path: Path) -> None:
        """Write the private key to `path`, for its owner only, and the public key beside it (".pub").

        Raises:
            FileExistsError: one is there: a key is never overwritten.
        """
        halves = ((path, self.private_text(), 0o600), (public_path(path), self.public_text(), 0o644))
        for target, text, mode in halves:
            with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
                file.write(text)

    def sign(self, manifest: bytes) -> SignedManifest:
        """Return the serialised manifest with a signature over exactly these bytes."""
        signature = self._private_key.sign(_CONTEXT + manifest).signature
        return SignedManifest(manifest=manifest, signature=signature, public_key=self.public_key)


def public_path(path: Path) -> Path:
    """Return where the public half of the key file `path` is."""
    return path.with_name(path.name + ".pub")


def parse_public_key(text: str) -> bytes:
    """Return the 32 bytes of a public key, from its file's text or from plain hex.

    Raises:
        KeyFileError: it is neither.
    """
    return _parse(text if _PUBLIC in text else f"{_PUBLIC} {text}", _PUBLIC)


def _parse(text: str, kind: str) -> bytes:
    words = text.split()
    if len(words) != 2 or words[0] != kind or len(words[1]) != 64:
        raise KeyFileError(f'not a key: "{kind}" and 64 hex digits are expected')
    try:
        return bytes.fromhex(words[1])
    except ValueError as error:
        raise KeyFileError("not a key: the digits are not hexadecimal") from error


def verify(signed: SignedManifest, trusted: TrustSet, *, purpose: str = PURPOSE_ARTIFACT) -> Manifest:
    """Return the manifest, after its signature and signer were found good for `purpose`.

    That it answers the reader's own request is the reader's to check.

    Raises:
        SignatureError: it must not be used; `kind` says why.
    """
    if len(signed.manifest) > MANIFEST_BYTES:
        raise SignatureError(SignatureErrorKind.BAD, f"a manifest of {len(signed.manifest)} bytes")
    if signed.signature:
        builder = _verify_signature(signed, trusted, purpose)
    elif trusted.allow_unsigned and purpose == PURPOSE_ARTIFACT:
        builder = ""
    else:
        raise SignatureError(SignatureErrorKind.UNSIGNED, "the manifest is not signed")
    manifest = Manifest()
    try:
        manifest.ParseFromString(signed.manifest)
    except DecodeError as error:
        raise SignatureError(SignatureErrorKind.BAD, "the manifest cannot be parsed") from error
    if manifest.schema != MANIFEST_SCHEMA:
        raise SignatureError(SignatureErrorKind.BAD, f"manifest schema {manifest.schema} is not known here")
    if manifest.purpose != purpose:
        raise SignatureError(
            SignatureErrorKind.UNTRUSTED, f"made as {manifest.purpose!r}, wanted as {purpose!r}"
        )
    if builder and manifest.builder != builder:
        raise SignatureError(SignatureErrorKind.BAD, "the manifest names another builder than its signer")
    if manifest.builder in trusted.revoked:
        raise SignatureError(SignatureErrorKind.REVOKED, f"builder {manifest.builder} was recalled")
    return manifest


def _verify_signature(signed: SignedManifest, trusted: TrustSet, purpose: str) -> str:
    """Return the signer's builder id."""
    keys = trusted.bytecode_keys if purpose == PURPOSE_BYTECODE else trusted.keys
    builder = builder_id(signed.public_key)
    if builder in trusted.revoked:
        raise SignatureError(SignatureErrorKind.REVOKED, f"builder {builder} was recalled")
    if signed.public_key not in keys:
        raise SignatureError(SignatureErrorKind.UNTRUSTED, f"builder {builder} is not trusted for {purpose}")
    if len(signed.signature) != SIGNATURE_BYTES:
        raise SignatureError(SignatureErrorKind.BAD, f"a signature of {len(signed.signature)} bytes")
    try:
        # libsodium's own form, signature first. Half of what OpenSSL takes, in every hit (DECISIONS/0023).
        crypto_sign_open(signed.signature + _CONTEXT + signed.manifest, signed.public_key)
    except (CryptoError, ValueError) as error:
        raise SignatureError(
            SignatureErrorKind.BAD, f"the signature of builder {builder} does not fit"
        ) from error
    return builder
