"""The bound on a lookup holds for all calls that one takes, not for each."""

from __future__ import annotations

import time

import pytest

from fuse_cache.client.errors import DaemonUnavailableError
from tests.client.conftest import MakeClient
from tests.fakes import FakeDaemon, make_want

pytestmark = pytest.mark.apart


def test_capabilities_a_lookup_and_new_revocations_share_one_bound_of_two_seconds(
    daemon: FakeDaemon, endpoint: str, make_client: MakeClient
) -> None:
    client = make_client(endpoint)
    daemon.capabilities_delay_s = daemon.lookup_delay_s = 1.2
    began_s = time.monotonic()
    (answer,) = client.obtain([make_want()])
    # Each call is within the bound; Capabilities and Lookup together are not.
    assert isinstance(answer.error, DaemonUnavailableError)
    assert time.monotonic() - began_s < 2.3
    assert answer.lookup_seconds < 2.3
    assert daemon.calls == {"Capabilities": 1, "Lookup": 1}


def test_revocations_that_are_asked_for_anew_share_the_bound_too(
    daemon: FakeDaemon, endpoint: str, make_client: MakeClient
) -> None:
    client = make_client(endpoint)
    client.known()
    daemon.revocations_version = 1
    daemon.capabilities_delay_s = daemon.lookup_delay_s = 1.2
    began_s = time.monotonic()
    (answer,) = client.obtain([make_want()])
    assert isinstance(answer.error, DaemonUnavailableError)
    assert time.monotonic() - began_s < 2.3
