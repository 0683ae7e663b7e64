"""The key: every field counts, and the encoding stays for ever."""

from __future__ import annotations

import dataclasses

import pytest

from fuse_cache.server.key import KeyFields, difference

FIELDS = KeyFields(
    request_digest=bytes(range(32)),
    namespace="team",
    passes=(("eliminate_noops", b"\1" * 32), ("norm_quant", b"\2" * 32)),
    pass_manager=b"\7" * 32,
    target="cpu-avx2",
    python="3.11",
    torch_fingerprint=b"\3" * 32,
    triton_fingerprint=b"",
    cxx="gcc version 12.2.0 (Debian 12.2.0-14), x86_64-linux-gnu",
    kernel_sources=b"\4" * 32,
    worker_sources=b"\5" * 32,
    op_modules=("my.ops",),
)
# Golden: entries in stores have this name. Another one needs another schema.
GOLDEN = "93acef1b0571be4a757ab81e574baf5db2e7b1f3d480b8a45d90f515d295401a"


def other(value: object) -> object:
    if isinstance(value, bytes):
        return value + b"x"
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, tuple):
        return value[:-1]
    assert isinstance(value, int)
    return value + 1


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(KeyFields)])
def test_every_field_changes_the_key(name: str) -> None:
    changed = dataclasses.replace(FIELDS, **{name: other(getattr(FIELDS, name))})  # type: ignore[arg-type]
    assert changed.digest() != FIELDS.digest()
    assert difference(changed.describe(), FIELDS.describe())


def test_the_order_of_passes_and_each_fingerprint_change_the_key() -> None:
    reversed_passes = dataclasses.replace(FIELDS, passes=FIELDS.passes[::-1])
    edited = dataclasses.replace(FIELDS, passes=(FIELDS.passes[0], ("norm_quant", b"\6" * 32)))
    assert len({FIELDS.digest(), reversed_passes.digest(), edited.digest()}) == 3
    assert difference(edited.describe(), FIELDS.describe()) == [
        ("pass.norm_quant", ("06" * 32), ("02" * 32)),
    ]


def test_the_key_of_these_fields_never_changes() -> None:
    assert FIELDS.digest().hex() == GOLDEN


def test_a_difference_names_fields_that_only_one_side_has() -> None:
    assert difference([("a", "1"), ("b", "2")], [("b", "2"), ("c", "3")]) == [
        ("a", "1", None),
        ("c", None, "3"),
    ]
