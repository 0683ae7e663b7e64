"""Which toolchain serves which host: the compatibility table, with stated facts."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest

from fuse_cache.proto.artifact_pb2 import Toolchain as Message
from fuse_cache.proto.toolchain import Toolchain
from fuse_cache.server.builders import Builder, Builders, Host, choose, host_of
from fuse_cache.server.errors import InvalidRequestError

OLD = Toolchain(
    python="3.11", torch="2.11.0+cu130", triton="3.6.0", torch_fingerprint=b"o" * 32,
    triton_fingerprint=b"p" * 32, cuda="13.0", torch_sources=b"s" * 32,
)  # fmt: skip
NEW = dataclasses.replace(
    OLD, torch="2.13.0+cu130", triton="3.7.1", torch_fingerprint=b"n" * 32, torch_sources=b"t" * 32
)
CPU_WHEEL = dataclasses.replace(NEW, torch="2.13.0+cpu", torch_fingerprint=b"c" * 32, cuda="")
# What the wheels of one release have for another Python: other libraries, the same sources.
HOST_312 = dataclasses.replace(OLD, python="3.12", torch_fingerprint=b"x" * 32, triton_fingerprint=b"y" * 32)
OFFER = [NEW, OLD, CPU_WHEEL]


def host(toolchain: Toolchain, *, any_wheel: bool = False) -> Host:
    return host_of(toolchain.to_message(), any_wheel=any_wheel)


@pytest.mark.parametrize(
    ("toolchain", "target", "place"),
    [
        (NEW, "cpu-avx2", 0),
        (OLD, "cpu-avx2", 1),
        (OLD, "sm_90", 1),
        (CPU_WHEEL, "cpu-avx2", 2),
        (HOST_312, "sm_90", 1),  # a 3.11 builder serves a 3.12 host
        (HOST_312, "cpu-avx2", None),  # but not with extension modules
        (dataclasses.replace(HOST_312, torch_sources=b"z" * 32), "sm_90", None),  # patched by somebody
        (dataclasses.replace(HOST_312, triton="3.5.0"), "sm_90", None),
        (dataclasses.replace(OLD, torch="2.12.0+cu130"), "sm_90", None),
        (dataclasses.replace(OLD, torch_fingerprint=b"z" * 32), "sm_90", None),
    ],
)
def test_a_host_is_served_by_the_toolchain_whose_artifacts_it_can_use(
    toolchain: Toolchain, target: str, place: int | None
) -> None:
    assert choose(host(toolchain), target, OFFER) == place


def test_a_host_that_says_so_takes_another_wheel_of_its_release_and_its_own_before_that() -> None:
    assert choose(host(NEW), "sm_90", [CPU_WHEEL]) is None
    assert choose(host(NEW, any_wheel=True), "sm_90", [CPU_WHEEL]) == 0
    assert choose(host(NEW, any_wheel=True), "sm_90", [CPU_WHEEL, NEW]) == 1
    assert choose(host(OLD, any_wheel=True), "sm_90", [CPU_WHEEL]) is None
    other_python = dataclasses.replace(NEW, python="3.12", torch_fingerprint=b"x" * 32)
    assert choose(host(other_python, any_wheel=True), "sm_90", [CPU_WHEEL, NEW]) == 1


def test_a_host_that_does_not_say_what_it_has_gets_the_first() -> None:
    assert choose(host_of(Message(), any_wheel=False), "sm_90", OFFER) == 0


class _Freshness:
    def __init__(self, toolchain: Toolchain, epoch: str) -> None:
        self.epoch: Any = dataclasses.make_dataclass("Epoch", ["name", "toolchain"])(epoch, toolchain)


def builders(*toolchains: tuple[str, Toolchain]) -> Builders:
    nothing: Any = None
    return Builders(
        Builder(
            name=name, freshness=cast(Any, _Freshness(toolchain, f"epoch of {name}")), link=nothing,
            pool=nothing, seeds=nothing,
        )
        for name, toolchain in toolchains
    )  # fmt: skip


def test_a_refusal_names_every_toolchain_and_why_it_will_not_do() -> None:
    both = builders(("own", NEW), ("old", OLD))
    assert both.choose(host(HOST_312), "cpu-avx2") is None
    told = both.refusal(host(HOST_312), "cpu-avx2")
    assert "own: built with Python 3.11, this host has 3.12, old: built with Python 3.11" in told
    assert f"on offer: own: {NEW}; old: {OLD}" in told
    one = builders(("own", NEW))
    assert one.refusal(host(OLD), "sm_90").endswith(f"on offer: {NEW}")


def test_an_upgrade_in_place_is_chosen_by_anew() -> None:
    both = builders(("own", NEW), ("old", OLD))
    old = list(both)[1]
    assert both.choose(host(OLD), "sm_90") is old
    cast(Any, old.freshness).epoch.toolchain = CPU_WHEEL
    cast(Any, old.freshness).epoch.name = "after the upgrade"
    assert both.choose(host(OLD), "sm_90") is None


def test_a_toolchain_longer_than_any_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"toolchain: .* the limit is 512"):
        host_of(Message(torch="2" * 600), any_wheel=False)
