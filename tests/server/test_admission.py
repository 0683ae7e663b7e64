"""What a Compile must be before anything is done for it: its target and the facts of its GPU."""

from __future__ import annotations

import dataclasses

import pytest

from fuse_cache.proto.compile_pb2 import CompileStart
from fuse_cache.proto.pass_config import PassConfig, PassContext
from fuse_cache.proto.target_facts import requested
from fuse_cache.server.admission import Gate
from fuse_cache.server.builders import Builders
from fuse_cache.server.epoch import Epoch
from fuse_cache.server.errors import InvalidRequestError, NotOnOfferError
from tests.server.harness import piece
from tests.server.test_builders import NEW, builders


def start(target: str, facts: tuple[tuple[str, object], ...]) -> CompileStart:
    request = dataclasses.replace(piece().request, target=target, target_facts=facts)  # type: ignore[arg-type]
    wanted = dataclasses.replace(piece(), request=request)
    found = wanted.start
    found.toolchain.CopyFrom(NEW.to_message())
    return found


@pytest.mark.parametrize(
    ("target", "facts"),
    [
        ("sm_90", (("memory_bytes", 1),)),
        ("sm_90", (("multiprocessors", -3),)),
        ("sm_90", (("multiprocessors", 10**9),)),
        ("cpu-avx2", (("multiprocessors", 8),)),
    ],
)
def test_facts_that_no_builder_can_use_are_refused_before_they_become_a_key(
    target: str, facts: tuple[tuple[str, object], ...]
) -> None:
    with pytest.raises(InvalidRequestError, match="target_facts: ") as caught:
        Gate(("sm_90", "cpu-avx2"), builders(("own", NEW))).admit(start(target, facts))
    assert caught.value.reason == "REQUEST_MALFORMED"


def test_the_facts_of_a_gpu_are_part_of_the_key() -> None:
    gate = Gate(("sm_90",), _with_key_fields())
    keys = {gate.admit(start(*requested(name))).key.digest() for name in ("h100", "h200", "h100-pcie")}
    assert len(keys) == 2, "H100 and H200 share one, the PCIe card with fewer multiprocessors has another"


def test_an_architecture_that_is_not_on_offer_is_named_with_those_that_are() -> None:
    with pytest.raises(NotOnOfferError, match="nobody here builds for sm_80; on offer: sm_90"):
        Gate(("sm_90",), builders(("own", NEW))).admit(start(*requested("a100")))


def _with_key_fields() -> Builders:
    resolved = PassConfig().resolve(PassContext(target="cpu-avx2"))
    found = builders(("own", NEW))
    names = resolved.active_passes(piece().request.range)
    epoch = Epoch(
        name="e", passes=dict.fromkeys(names, b"p"), pass_manager=b"m", kernel_sources=b"k",
        worker_sources=b"w", header_sources=b"h", toolchain=NEW, cxx="g++", op_modules=(), op_tags=(),
    )  # fmt: skip
    found.first.freshness.epoch = epoch
    return found
