"""Artifacts of any size, sealed as a daemon seals them: transport can be measured without compiling."""

from __future__ import annotations

import os
from collections.abc import Iterator

import grpc

from fuse_cache.client.verify import Want
from fuse_cache.proto.admin_pb2 import ImportRequest
from fuse_cache.proto.admin_pb2_grpc import AdminStub
from fuse_cache.proto.graph import Graph, Input, Level, Node, NodeKind, Ref, TensorMeta
from fuse_cache.proto.graph_codec import encode, graph_digest
from fuse_cache.proto.limits import CHUNK_BYTES
from fuse_cache.proto.pass_config import PassConfig, PassContext
from fuse_cache.proto.request import Range, RequestFields
from fuse_cache.proto.trust import open_trust_folder
from fuse_cache.server.epoch import package_root, take_epoch, take_stamps
from fuse_cache.server.interpreter import own_interpreter
from fuse_cache.server.publish import Sealed, seal
from fuse_cache.server.worker.protocol import Built

TARGET = "cpu-avx2"


def want_of(rows: int) -> Want:
    """Return the request for a graph of one call on `rows` rows: another graph for each number."""
    meta = TensorMeta("float32", "cpu", (rows, 4), (4, 1))
    call = Node(NodeKind.FUNCTION, "torch.relu", (Ref(0),), (), meta)
    data = encode(Graph(Level.DYNAMO, (), (Input(meta),), (call,), (Ref(1),)))
    resolved = PassConfig().resolve(PassContext(target=TARGET))
    fields = RequestFields(
        graph_digest=graph_digest(data), pass_config=resolved.encode(), range=Range(), target=TARGET
    )
    return Want.of(fields, data, resolved)


def sealed_of(want: Want, content: bytes) -> Sealed:
    """Seal `content` as the answer to `want`, with the key of the trust folder."""
    whose = own_interpreter(package_root())
    epoch = take_epoch(take_stamps(whose), whose, op_modules=())
    key = epoch.key_fields(
        request_digest=want.request_digest, namespace="default", target=TARGET, passes=want.passes
    )
    return seal(
        Built(content=content, compile_seconds=3.0),
        key=key,
        request=want.fields,
        epoch=epoch,
        signing_key=open_trust_folder().signing_key(),
    )


def publish(channel: grpc.Channel, rows: int, size_bytes: int) -> Want:
    """Import an artifact of random bytes into a daemon and return the request that it answers."""
    want = want_of(rows)
    content = os.urandom(size_bytes)
    sealed = sealed_of(want, content)

    def messages() -> Iterator[ImportRequest]:
        yield ImportRequest(manifest=sealed.signed)
        for offset in range(0, size_bytes, CHUNK_BYTES):
            yield ImportRequest(chunk=content[offset : offset + CHUNK_BYTES])

    answer = AdminStub(channel).Import(messages(), timeout=60)
    assert answer.entries == 1
    return want
