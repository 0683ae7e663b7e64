"""The form of a stored file: it comes back as it was, or is found to be damaged."""

from __future__ import annotations

import io

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from fuse_cache.server.cache.entry_file import DamagedFileError, encode_header, read_entry, read_header
from fuse_cache.server.cache.facts import Facts, decode_facts
from fuse_cache.server.cache.tier import Entry, Meta, Space
from tests.server.cache.artifacts import artifact

NAMES = st.binary(min_size=32, max_size=32)
METAS = st.builds(
    lambda cost_s, content, facts: Meta(cost_s=cost_s, content=content, facts=facts),
    st.floats(allow_nan=False),
    st.one_of(st.just(b""), NAMES),
    st.binary(max_size=300),
)


@settings(max_examples=50)
@given(st.sampled_from(list(Space)), st.binary(max_size=500), METAS, NAMES)
def test_an_entry_comes_back_as_it_was(space: Space, data: bytes, meta: Meta, key: bytes) -> None:
    name = blake3(data).digest() if space is Space.CONTENT else key
    written = encode_header(space, name, Entry(data, meta)) + data
    found = read_entry(io.BytesIO(written), space, name, "disk")
    assert (found.data, found.meta, found.tier) == (data, meta, "disk")
    header = read_header(io.BytesIO(written))
    assert header.file_bytes == len(written)


def test_every_changed_byte_of_a_manifest_file_is_found_out() -> None:
    made = artifact(1)
    good = encode_header(Space.MANIFEST, made.key, made.manifest_entry) + made.signed_manifest
    for at in range(len(good)):
        bad = good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :]
        with pytest.raises(DamagedFileError):
            read_entry(io.BytesIO(bad), Space.MANIFEST, made.key, "disk")


def test_every_cut_of_a_content_file_is_found_out() -> None:
    made = artifact(1)
    good = encode_header(Space.CONTENT, made.digest, made.content_entry) + made.content
    for length in range(len(good)):
        with pytest.raises(DamagedFileError):
            read_entry(io.BytesIO(good[:length]), Space.CONTENT, made.digest, "disk")


def test_a_file_under_another_name_is_found_out() -> None:
    made = artifact(1)
    good = encode_header(Space.MANIFEST, made.key, made.manifest_entry) + made.signed_manifest
    with pytest.raises(DamagedFileError, match="another entry"):
        read_entry(io.BytesIO(good), Space.MANIFEST, artifact(2).key, "disk")
    with pytest.raises(DamagedFileError, match="another entry"):
        read_entry(io.BytesIO(good), Space.CONTENT, made.key, "disk")


NUMBERS = st.integers(0, 2**32 - 1)
FACTS = st.builds(
    lambda numbers, texts, family, toolchain, seconds: Facts(
        lower=numbers[0],
        upper=numbers[1],
        symbol_plus_one=numbers[2],
        revision=numbers[3],
        created_unix_s=numbers[4],
        content_bytes=numbers[5],
        nodes=numbers[6],
        compile_seconds=seconds,
        namespace=texts[0],
        target=texts[1],
        epoch=texts[2],
        builder=texts[3],
        model=texts[4],
        family=family,
        toolchain=toolchain,
    ),
    st.tuples(*[NUMBERS] * 7),
    st.tuples(*[st.text(max_size=20)] * 5),
    st.binary(max_size=32),
    st.binary(max_size=64),
    st.floats(allow_nan=False),
)


@settings(max_examples=50)
@given(FACTS)
def test_facts_come_back_as_they_were(facts: Facts) -> None:
    assert decode_facts(facts.encode()) == facts


@settings(max_examples=50)
@given(st.binary(max_size=200))
def test_facts_of_any_bytes_are_facts_or_nothing(data: bytes) -> None:
    found = decode_facts(data)
    assert found is None or isinstance(found, Facts)


def test_cut_facts_are_nothing() -> None:
    whole = artifact(1).meta.facts
    assert decode_facts(whole) is not None
    assert [decode_facts(whole[:length]) for length in range(len(whole))] == [None] * len(whole)
