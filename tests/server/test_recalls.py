"""A recall is for good: over restarts, and for every daemon of one store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest

from fuse_cache.proto.admin_pb2 import RemoveRequest
from fuse_cache.proto.artifact_pb2 import Manifest
from fuse_cache.proto.compile_pb2 import CapabilitiesRequest
from tests.server.harness import CALL_S, FakeDaemon, compile_piece, lookup, piece, until


def test_a_recalled_builder_stays_recalled_after_a_restart_and_on_the_other_daemons_of_its_store(
    tmp_path: Path,
) -> None:
    store, wanted = str(tmp_path / "store"), piece(number=12)
    with (
        FakeDaemon(tmp_path / "other", store=store) as other,
        FakeDaemon(tmp_path / "d", store=store) as daemon,
    ):
        builder = Manifest.FromString(compile_piece(daemon.stub(), wanted).done.manifest.manifest).builder
        admin = daemon.admin()
        with pytest.raises(grpc.RpcError) as caught:
            admin.Remove(RemoveRequest(builder="../../etc"), timeout=CALL_S)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert admin.Remove(RemoveRequest(builder=builder), timeout=CALL_S).entries == 1
        until(lambda: list(_recalled(other)) == [builder], what="heard by the other daemon")
        daemon.stop()
        with daemon:
            assert list(_recalled(daemon)) == [builder]
            assert daemon.stub().Capabilities(CapabilitiesRequest(), timeout=CALL_S).revocations_version == 1
            assert not lookup(daemon.stub(), wanted).results[0].found


def _recalled(daemon: FakeDaemon) -> Sequence[str]:
    return daemon.stub().Capabilities(CapabilitiesRequest(), timeout=CALL_S).revoked_builders
