from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuse_cache.proto.digest import FieldDigest, Value, encode_value
from fuse_cache.proto.errors import RequestError
from fuse_cache.proto.pass_resolved import TokenLimits, resolved_from
from fuse_cache.proto.request import Ambient, Range, RequestFields, decode_request
from fuse_cache.proto.request_reader import read_values

REQUEST = RequestFields(
    graph_digest=bytes(range(32)),
    pass_config=b"FCPC\x01config",
    range=Range(symbol=0, lower=1, upper=256),
    target="cpu-avx2",
    target_facts=(("cores", 2), ("l2", 1.5)),
    inductor_options=(("max_autotune", True), ("mode", "default")),
    ambient=Ambient(autocast=(("cpu", "bfloat16"),)),
)

# One other value for each field. A field without one fails the test that goes through the fields.
OTHERS: dict[str, Any] = {
    "graph_digest": bytes(32),
    "pass_config": b"",
    "range": Range(symbol=0, lower=2, upper=256),
    "target": "sm_90",
    "target_facts": (("cores", 2), ("l2", 2)),
    "inductor_options": (("max_autotune", 1), ("mode", "default")),
    "attention_backend": "flash",
    "ambient": Ambient(),
}
OTHER_AMBIENT: dict[str, Any] = {
    "grad_mode": True,
    "inference_mode": True,
    "autocast": (("cuda", "float16"),),
    "default_dtype": "bfloat16",
    "deterministic": True,
    "deterministic_fill": False,
    "float32_matmul_precision": "high",
    "allow_tf32": True,
    "allow_bf16_reduced_precision": False,
    "allow_fp16_reduced_precision": False,
    "sdpa_backends": ("math",),
}


def test_a_request_comes_back() -> None:
    assert decode_request(REQUEST.encode()) == REQUEST


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(RequestFields)])
def test_every_field_changes_bytes_and_digest(name: str) -> None:
    other = dataclasses.replace(REQUEST, **{name: OTHERS[name]})
    assert other.encode() != REQUEST.encode()
    assert other.request_digest() != REQUEST.request_digest()
    assert decode_request(other.encode()) == other
    assert (other.family_digest() == REQUEST.family_digest()) is (name == "range")


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Ambient)])
def test_every_ambient_field_changes_the_digest(name: str) -> None:
    other = dataclasses.replace(
        REQUEST, ambient=dataclasses.replace(REQUEST.ambient, **{name: OTHER_AMBIENT[name]})
    )
    assert other.request_digest() != REQUEST.request_digest()
    assert decode_request(other.encode()) == other


def test_a_family_has_ranges_of_one_symbol() -> None:
    def family(compile_range: Range) -> bytes:
        return dataclasses.replace(REQUEST, range=compile_range).family_digest()

    assert family(Range(symbol=0, lower=1, upper=9)) == family(Range(symbol=0, lower=7, upper=7))
    assert family(Range(symbol=1, lower=1, upper=9)) != family(Range(symbol=0, lower=1, upper=9))
    assert family(Range()) != family(Range(symbol=0, lower=1, upper=9))


def test_equal_requests_made_of_other_objects_have_equal_digests() -> None:
    copy = decode_request(REQUEST.encode())
    assert copy.request_digest() == REQUEST.request_digest()
    assert copy.request_digest() != copy.family_digest()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("graph_digest", b"short"),
        ("graph_digest", "x" * 32),
        ("range", Range(symbol=None, lower=1, upper=2)),
        ("range", Range(symbol=0, lower=3, upper=2)),
        ("range", Range(symbol=-1, lower=1, upper=2)),
        ("range", Range(symbol=0, lower=-1, upper=2)),
        ("range", Range(symbol=0, lower=1, upper=1 << 63)),
        ("range", Range(symbol=True, lower=1, upper=2)),
        ("target", ""),
        ("target", "sm 90"),
        ("target", "sm_90\n"),
        ("target", "x" * 129),
        ("target_facts", (("b", 1), ("a", 1))),
        ("target_facts", (("a", 1), ("a", 2))),
        ("target_facts", [("a", 1)]),
        ("inductor_options", (("a", None),)),
        ("inductor_options", (("a", "line\nbreak"),)),
        ("inductor_options", (("a", b"x"),)),
        ("ambient", Ambient(sdpa_backends=("math", "flash"))),
        ("ambient", Ambient(grad_mode=1)),  # type: ignore[arg-type]  # what a careless caller passes
        ("ambient", Ambient(autocast=(("cuda", "x"), ("cpu", "x")))),
    ],
)
def test_values_that_a_field_cannot_have_are_refused(name: str, value: object) -> None:
    with pytest.raises(RequestError):
        dataclasses.replace(REQUEST, **{name: value}).encode()  # type: ignore[arg-type]  # that is the point


def test_every_prefix_and_every_longer_form_is_refused() -> None:
    data = REQUEST.encode()
    for length in range(len(data)):
        with pytest.raises(RequestError):
            decode_request(data[:length])
    for more in (b"\x00", b"\x02", data):
        with pytest.raises(RequestError):
            decode_request(data + more)
    with pytest.raises(RequestError, match="limit"):
        decode_request(data[:4] + b"\x00" * 70_000)


def test_damaged_requests_are_refused_or_canonical() -> None:
    data = REQUEST.encode()
    source = random.Random(5)
    for _ in range(5_000):
        copy = bytearray(data)
        for _ in range(source.randrange(1, 4)):
            copy[source.randrange(4, len(copy))] = source.randrange(256)
        try:
            decoded = decode_request(bytes(copy))
        except RequestError:
            continue  # anything else would fail the test
        assert decoded.encode() == bytes(copy)


def test_the_description_names_every_field_for_people() -> None:
    described = dict(REQUEST.describe())
    assert described["range"] == "s0 in [1, 256]"
    assert "not known" in described["pass_config"]
    assert described["graph"] == bytes(range(32)).hex()
    assert described["inductor_options.max_autotune"] == "True"
    assert described["ambient.autocast"] == "cpu bfloat16"
    assert described["ambient.sdpa_backends"] == "cudnn, efficient, flash, math"
    assert len(described) == len(REQUEST.describe())


def test_passes_are_described_by_name_and_limits() -> None:
    resolved = resolved_from({"norm_quant": TokenLimits(1, 512)})
    described = dataclasses.replace(REQUEST, pass_config=resolved.encode()).describe()
    assert ("pass_config.norm_quant", "[1, 512] tokens") in described
    assert not any(name == "pass_config.act_quant" for name, _ in described)


def test_two_requests_that_differ_in_one_field_are_described_by_one_difference() -> None:
    other = dataclasses.replace(REQUEST, target="sm_90")
    assert set(REQUEST.describe()) ^ set(other.describe()) == {("target", "cpu-avx2"), ("target", "sm_90")}


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(1 << 63), (1 << 63) - 1),
        st.floats(),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
        st.binary(max_size=5),
    ),
    lambda parts: st.lists(parts, max_size=3).map(tuple),
    max_leaves=6,
)


@given(VALUES)
def test_values_come_back(value: Value) -> None:
    (read,) = read_values(encode_value(value), 0)
    assert repr(read) == repr(value)


def test_values_of_other_types_and_depths_are_refused() -> None:
    deep: Any = ()
    for _ in range(9):
        deep = (deep,)
    refused: list[Any] = [1 << 63, [1], {1: 2}, object(), deep, 1j]
    for value in refused:
        with pytest.raises(TypeError):
            encode_value(value)
    with pytest.raises(RequestError, match="nested"):
        read_values(b"\x07\x01" * 10_000, 0)


def test_fields_cannot_run_into_each_other() -> None:
    def digest(*fields: tuple[str, Value]) -> bytes:
        return FieldDigest("test").add_all(fields).digest()

    made = [
        digest(("a", "bc")),
        digest(("ab", "c")),
        digest(("a", "b"), ("c", "")),
        digest(("a", b"bc")),
        digest(("a", ("b", "c"))),
        digest(("a", ("bc",))),
        digest(("a", "bc"), ("a", "bc")),
        digest(),
        FieldDigest("other").add("a", "bc").digest(),
        digest(("a", 1)),
        digest(("a", True)),
        digest(("a", 1.0)),
        digest(("a", "1")),
    ]
    assert len(set(made)) == len(made)
