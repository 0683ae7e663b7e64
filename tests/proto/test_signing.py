from __future__ import annotations

import os
from pathlib import Path

import pytest

from fuse_cache.proto.artifact_pb2 import Manifest, SignedManifest
from fuse_cache.proto.signing import (
    KeyFileError,
    SignatureError,
    SignatureErrorKind,
    SigningKey,
    TrustSet,
    builder_id,
    parse_public_key,
    public_path,
    verify,
)

KEY = SigningKey.generate()
OTHER = SigningKey.generate()
TRUSTED = TrustSet(keys=frozenset({KEY.public_key}))


def manifest(**fields: object) -> Manifest:
    made: dict[str, object] = {"schema": 1, "builder": KEY.builder, "purpose": "artifact"}
    made["namespace"] = "default"
    return Manifest(**{**made, **fields})  # type: ignore[arg-type]  # fields by name


def refused(
    signed: SignedManifest, trusted: TrustSet = TRUSTED, purpose: str = "artifact"
) -> SignatureErrorKind:
    with pytest.raises(SignatureError) as caught:
        verify(signed, trusted, purpose=purpose)
    return caught.value.kind


def test_a_manifest_signed_by_a_trusted_builder_is_returned() -> None:
    signed = KEY.sign(manifest().SerializeToString())
    assert verify(signed, TRUSTED) == manifest()
    again = SignedManifest()
    again.ParseFromString(signed.SerializeToString())
    assert verify(again, TRUSTED) == manifest()


def test_a_signer_that_is_not_on_the_list_is_untrusted_whatever_the_message_says() -> None:
    signed = OTHER.sign(manifest(builder=OTHER.builder).SerializeToString())
    assert refused(signed) is SignatureErrorKind.UNTRUSTED
    signed.public_key = KEY.public_key
    assert refused(signed) is SignatureErrorKind.BAD
    assert refused(KEY.sign(manifest().SerializeToString()), TrustSet()) is SignatureErrorKind.UNTRUSTED


def test_every_changed_byte_of_manifest_and_signature_is_noticed() -> None:
    signed = KEY.sign(manifest().SerializeToString())
    for name in ("manifest", "signature"):
        value = getattr(signed, name)
        for at in range(len(value)):
            changed = SignedManifest()
            changed.CopyFrom(signed)
            setattr(changed, name, value[:at] + bytes([value[at] ^ 0x10]) + value[at + 1 :])
            assert refused(changed) is SignatureErrorKind.BAD
    signed.signature = signed.signature[:-1]
    assert refused(signed) is SignatureErrorKind.BAD


def test_unsigned_manifests_need_to_be_allowed_aloud() -> None:
    unsigned = SignedManifest(manifest=manifest(builder="").SerializeToString())
    assert refused(unsigned) is SignatureErrorKind.UNSIGNED
    assert verify(unsigned, TrustSet(allow_unsigned=True)).namespace == "default"
    bytecode = SignedManifest(manifest=manifest(purpose="bytecode").SerializeToString())
    assert refused(bytecode, TrustSet(allow_unsigned=True), "bytecode") is SignatureErrorKind.UNSIGNED


def test_allowing_unsigned_manifests_does_not_allow_badly_signed_ones() -> None:
    signed = OTHER.sign(manifest(builder=OTHER.builder).SerializeToString())
    assert refused(signed, TrustSet(allow_unsigned=True)) is SignatureErrorKind.UNTRUSTED


def test_a_recalled_builder_is_refused_although_its_key_is_trusted() -> None:
    signed = KEY.sign(manifest().SerializeToString())
    recalled = TrustSet(keys=frozenset({KEY.public_key}), revoked=frozenset({KEY.builder}))
    assert refused(signed, recalled) is SignatureErrorKind.REVOKED
    unsigned = SignedManifest(manifest=signed.manifest)
    allowing = TrustSet(revoked=frozenset({KEY.builder}), allow_unsigned=True)
    assert refused(unsigned, allowing) is SignatureErrorKind.REVOKED


def test_a_builder_of_artifacts_is_no_builder_of_bytecode() -> None:
    artifact = KEY.sign(manifest().SerializeToString())
    bytecode = KEY.sign(manifest(purpose="bytecode").SerializeToString())
    assert refused(bytecode) is SignatureErrorKind.UNTRUSTED
    assert refused(bytecode, purpose="bytecode") is SignatureErrorKind.UNTRUSTED
    both = TrustSet(keys=TRUSTED.keys, bytecode_keys=TRUSTED.keys)
    assert verify(bytecode, both, purpose="bytecode").purpose == "bytecode"
    assert refused(artifact, both, "bytecode") is SignatureErrorKind.UNTRUSTED
    assert refused(bytecode, both) is SignatureErrorKind.UNTRUSTED


@pytest.mark.parametrize("fields", [{"schema": 2}, {"schema": 0}, {"builder": "00" * 16}], ids=str)
def test_signed_manifests_that_are_malformed_are_bad(fields: dict[str, object]) -> None:
    assert refused(KEY.sign(manifest(**fields).SerializeToString())) is SignatureErrorKind.BAD


def test_signed_bytes_that_are_no_manifest_are_bad() -> None:
    assert refused(KEY.sign(b"\xff\xff\xff")) is SignatureErrorKind.BAD
    assert refused(SignedManifest(manifest=bytes(2 << 20), signature=bytes(64))) is SignatureErrorKind.BAD


def test_a_signature_for_something_else_does_not_fit() -> None:
    data = manifest().SerializeToString()
    without_context = KEY._private_key.sign(data)
    signed = SignedManifest(manifest=data, signature=without_context, public_key=KEY.public_key)
    assert refused(signed) is SignatureErrorKind.BAD


def test_keys_are_saved_for_their_owner_only_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "key"
    KEY.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert SigningKey.load(path).public_key == KEY.public_key
    assert parse_public_key(public_path(path).read_text()) == KEY.public_key
    with pytest.raises(FileExistsError):
        OTHER.save(path)
    assert SigningKey.load(path).public_key == KEY.public_key


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    KEY.save(path)
    os.chmod(path, 0o640)
    with pytest.raises(KeyFileError, match="chmod 600"):
        SigningKey.load(path)


@pytest.mark.parametrize(
    "text",
    ["", "hello", "fuse-cache-ed25519-private zz", KEY.public_text()],
    ids=["empty", "other", "damaged", "public"],
)
def test_files_that_hold_no_private_key_are_refused(text: str) -> None:
    with pytest.raises(KeyFileError):
        SigningKey.from_text(text)


def test_public_keys_are_read_from_files_and_from_hex_but_never_from_private_files() -> None:
    assert parse_public_key(KEY.public_key.hex()) == KEY.public_key
    for text in (KEY.private_text(), "zz" * 32, "00" * 31, ""):
        with pytest.raises(KeyFileError):
            parse_public_key(text)


def test_a_key_does_not_show_itself() -> None:
    secret = KEY.private_text().split()[1]
    assert secret not in repr(KEY)
    assert KEY.builder == builder_id(KEY.public_key)
    assert len(KEY.builder) == 32
