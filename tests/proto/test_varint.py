from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuse_cache.proto.varint import (
    MAX_TOKEN,
    VarintError,
    float_token,
    pack,
    token_float,
    unpack,
    unzigzag,
    zigzag,
)


@given(st.lists(st.integers(0, MAX_TOKEN)))
def test_numbers_come_back(tokens: list[int]) -> None:
    assert unpack(pack(tokens)) == tokens


@given(st.binary(max_size=40))
def test_bytes_are_read_only_if_they_would_be_written_so(data: bytes) -> None:
    try:
        tokens = unpack(data)
    except VarintError:
        return
    assert pack(tokens) == data


@pytest.mark.parametrize(
    "data", [b"\x80", b"\x80\x00", b"\xff\x80\x00", b"\xff" * 10 + b"\x01", b"\x05\x81"], ids=bytes.hex
)
def test_numbers_that_are_long_or_cut_off_are_refused(data: bytes) -> None:
    with pytest.raises(VarintError):
        unpack(data)


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_signs_come_back(value: int) -> None:
    assert 0 <= zigzag(value) < 1 << 64
    assert unzigzag(zigzag(value)) == value


@given(st.floats())
def test_floats_come_back_bit_by_bit(value: float) -> None:
    assert struct.pack(">d", token_float(float_token(value))) == struct.pack(">d", value)


def test_round_floats_are_short() -> None:
    assert len(pack([float_token(1.0)])) <= 3
    assert len(pack([float_token(-math.inf)])) <= 3
