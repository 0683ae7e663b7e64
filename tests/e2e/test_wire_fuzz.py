"""Damaged messages over the wire: each is answered with OK or a named refusal, and nothing else changes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.message import Message

from fuse_cache.proto import admin_pb2, compile_pb2, graph_codec
from fuse_cache.proto import graph_format as form
from fuse_cache.proto.artifact_pb2 import Manifest, SignedManifest
from fuse_cache.proto.compile_pb2 import Verdict
from fuse_cache.proto.limits import CHUNK_BYTES
from fuse_cache.proto.pass_config import PassConfig, PassContext
from fuse_cache.proto.request import RequestFields
from fuse_cache.proto.signing import SigningKey
from fuse_cache.proto.toolchain import local_toolchain
from fuse_cache.proto.trust import open_trust_folder
from fuse_cache.proto.varint import pack, unpack
from tests.daemon import Daemon
from tests.e2e.conftest import MakeClient
from tests.e2e.mutate import mutate_bytes, mutate_fields
from tests.e2e.small import Small, silu_graph
from tests.server.harness import TARGET, reason_of, until

CALL_S = 60.0
# What a caller may be told. The rest (UNKNOWN, INTERNAL, UNAVAILABLE, a deadline) would be our failure.
NAMED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
}
STREAMED_IN = {"Compile", "Import"}
STREAMED_OUT = {"Compile", "Fetch", "Wait"}
METHODS: dict[str, tuple[str, type[Message]]] = {
    "Lookup": ("Compile", compile_pb2.LookupResponse),
    "Compile": ("Compile", compile_pb2.CompileEvent),
    "Fetch": ("Compile", compile_pb2.FetchChunk),
    "Wait": ("Compile", compile_pb2.CompileEvent),
    "Report": ("Compile", compile_pb2.ReportResponse),
    "Explain": ("Compile", compile_pb2.ExplainResponse),
    "Import": ("Admin", admin_pb2.ImportResponse),
}


class Wire:
    """A daemon as bytes go in and out of it."""

    def __init__(self, daemon: Daemon) -> None:
        self._channel = grpc.insecure_channel(daemon.endpoint, [("grpc.use_local_subchannel_pool", 1)])
        self.statuses: Counter[str] = Counter()

    def call(self, method: str, messages: list[bytes]) -> tuple[grpc.StatusCode, str, list[Message]]:
        """Return the status, its reason and the answers."""
        service, answer = METHODS[method]
        path = f"/fusecache.v1.{service}/{method}"
        streams = (
            "stream" if method in STREAMED_IN else "unary",
            "stream" if method in STREAMED_OUT else "unary",
        )
        make: Callable[..., Any] = getattr(self._channel, "_".join(streams))
        call = make(path, request_serializer=bytes, response_deserializer=answer.FromString)
        request = iter(messages) if method in STREAMED_IN else messages[0]
        answers: list[Message] = []
        try:
            got = call(request, timeout=CALL_S)
            answers += got if method in STREAMED_OUT else [got]
        except grpc.RpcError as error:
            code = error.code()
            self.statuses[f"{method} {code.name}"] += 1
            if code not in NAMED:
                pytest.fail(f"{method}: {code} {error.details()}\n{messages!r:.2000}")
            return code, reason_of(error), answers
        self.statuses[f"{method} OK"] += 1
        return grpc.StatusCode.OK, "", answers

    def close(self) -> None:
        self._channel.close()


@pytest.fixture
def wire(shared_daemon: Daemon) -> Iterator[Wire]:
    opened = Wire(shared_daemon)
    yield opened
    opened.close()


@pytest.fixture
def stored(shared_daemon: Daemon, make_client: MakeClient) -> tuple[Small, SignedManifest, bytes]:
    """A graph whose artifact the daemon holds, with its signed manifest and its content."""
    graph = silu_graph(1)
    (answer,) = make_client(shared_daemon, namespace="fuzz").obtain([graph.want()])
    assert answer.artifact is not None, answer.error
    return graph, answer.artifact.signed, answer.artifact.content


def good_messages(graph: Small, signed: SignedManifest, content: bytes) -> dict[str, list[Message]]:
    """Return a sound call of each method."""
    want, manifest = graph.want(), Manifest.FromString(signed.manifest)
    item = compile_pb2.LookupItem(
        request_digest=want.request_digest,
        family_digest=want.family_digest,
        target=TARGET,
        passes=want.passes,
    )
    item.range.SetInParent()
    toolchain = local_toolchain().to_message()
    report = compile_pb2.ReportItem(
        key=manifest.key, content_digest=manifest.content.digest, verdict=Verdict.VERDICT_USED, count=1
    )
    return {
        "Lookup": [
            compile_pb2.LookupRequest(
                namespace="fuzz", toolchain=toolchain, items=[item], inline_limit_bytes=1 << 20
            )
        ],
        "Compile": compile_messages(want.fields, want.graph),
        "Fetch": [compile_pb2.FetchRequest(namespace="fuzz", content_digest=manifest.content.digest)],
        "Wait": [compile_pb2.WaitRequest(namespace="fuzz", key=manifest.key, inline_limit_bytes=1 << 20)],
        "Report": [compile_pb2.ReportRequest(namespace="fuzz", items=[report])],
        "Explain": [compile_pb2.ExplainRequest(namespace="fuzz", miss_request_digest=b"")],
        "Import": [
            admin_pb2.ImportRequest(manifest=signed),
            *(
                admin_pb2.ImportRequest(chunk=content[at : at + CHUNK_BYTES])
                for at in range(0, len(content), CHUNK_BYTES)
            ),
        ],
    }


def compile_messages(fields: RequestFields, graph: bytes, **start: Any) -> list[Message]:
    """Return a sound Compile call for any graph bytes."""
    begin = compile_pb2.CompileStart(
        namespace="fuzz",
        request_digest=fields.request_digest(),
        request=fields.encode(),
        graph_digest=fields.graph_digest,
        graph_bytes=len(graph),
        toolchain=local_toolchain().to_message(),
        inline_limit_bytes=1 << 20,
    )
    for name, value in start.items():
        setattr(begin, name, value)
    chunks = [
        compile_pb2.GraphChunk(
            data=graph[at : at + CHUNK_BYTES], offset=at, last=at + CHUNK_BYTES >= len(graph)
        )
        for at in range(0, max(1, len(graph)), CHUNK_BYTES)
    ]
    return [
        compile_pb2.CompileRequest(start=begin),
        *(compile_pb2.CompileRequest(chunk=chunk) for chunk in chunks),
    ]


def fields_for(graph: bytes, target: str = TARGET) -> RequestFields:
    """Return a request whose digests fit the bytes, whatever those are."""
    return RequestFields(
        graph_digest=graph_codec.graph_digest(graph),
        pass_config=PassConfig().resolve(PassContext(target=TARGET)).encode(),
        range=silu_graph(1).want().fields.range,
        target=target,
    )


def send_graph(wire: Wire, graph: bytes, **start: Any) -> tuple[grpc.StatusCode, str, list[Message]]:
    """Offer bytes as a graph under digests that fit them: it is the validator that must refuse them."""
    return wire.call(
        "Compile", [m.SerializeToString() for m in compile_messages(fields_for(graph), graph, **start)]
    )


def damaged_call(method: str, good: list[Message], rng: random.Random) -> list[bytes]:
    """Return the call with one message damaged, or one left out, doubled or out of place."""
    messages = [type(message).FromString(message.SerializeToString()) for message in good]
    at = rng.randrange(len(messages))
    kind = rng.randrange(4)
    if kind == 0:
        mutate_fields(messages[at], rng)
    raw = [message.SerializeToString() for message in messages]
    if kind == 1:
        raw[at] = mutate_bytes(raw[at], rng)
    elif kind == 2:
        raw[at] = rng.randbytes(rng.randint(0, 64))
    elif kind == 3 and method in STREAMED_IN:
        rng.choice((lambda: raw.pop(at), lambda: raw.insert(at, raw[at]), lambda: rng.shuffle(raw)))()
    elif kind == 3:
        mutate_fields(messages[at], rng)
        raw[at] = mutate_bytes(messages[at].SerializeToString(), rng)
    return raw


def resources(daemon: Daemon) -> tuple[int, int]:
    """Return open files of the daemon process, and all processes below it."""
    assert daemon.process is not None
    process = psutil.Process(daemon.process.pid)
    return process.num_fds(), len(process.children(recursive=True))


def fuzz(
    wire: Wire, daemon: Daemon, stored: tuple[Small, SignedManifest, bytes], rounds: int, seed: int
) -> None:
    good = good_messages(*stored)
    for method, messages in good.items():
        code, reason, _ = wire.call(method, [message.SerializeToString() for message in messages])
        assert code is grpc.StatusCode.OK, f"{method}: {reason}"
    before = resources(daemon)
    rng = random.Random(seed)
    for number in range(rounds):
        method = rng.choice(list(good))
        if rng.random() < 0.15:
            send_graph(wire, mutate_bytes(stored[0].encoded.data, rng))
        else:
            wire.call(method, damaged_call(method, good[method], rng))
        if number % 100 == 99:
            assert daemon.process is not None
            assert daemon.process.poll() is None, daemon.log()
    for method, messages in good.items():
        code, reason, answers = wire.call(method, [message.SerializeToString() for message in messages])
        assert code is grpc.StatusCode.OK, f"{method} afterwards: {reason}"
        if method == "Lookup":
            assert answers[0].results[0].found  # type: ignore[attr-defined]  # a LookupResponse
    refused = sum(count for name, count in wire.statuses.items() if not name.endswith(" OK"))
    assert refused > rounds // 4, wire.statuses
    # Idle connections, caches and a worker that ends take a moment; a leak of one file per call would be
    # hundreds.
    until(lambda: resources(daemon)[0] <= before[0] + 8, what=f"files: {before} {resources(daemon)}")
    until(lambda: resources(daemon)[1] <= before[1], what=f"processes: {before} {resources(daemon)}")


def test_a_hundred_damaged_messages_are_refused_by_name_and_change_nothing(
    wire: Wire, shared_daemon: Daemon, stored: tuple[Small, SignedManifest, bytes]
) -> None:
    fuzz(wire, shared_daemon, stored, rounds=100, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_thousand_damaged_messages_are_refused_by_name_and_change_nothing(
    wire: Wire, shared_daemon: Daemon, stored: tuple[Small, SignedManifest, bytes]
) -> None:
    fuzz(wire, shared_daemon, stored, rounds=2000, seed=2)


GRAPH_REASONS = {"GRAPH_MALFORMED", "GRAPH_TOO_LARGE", "TARGET_OP_UNKNOWN", "DIGEST_MISMATCH"}


def _hostile_graphs() -> dict[str, bytes]:
    """Bytes that are no graph, each in a way of its own."""
    good = silu_graph(1).encoded.data
    values = unpack(good[len(form.HEADER) :])
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 0x10
    return {
        "empty": b"",
        "garbage": random.Random(3).randbytes(4096),
        "pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
        "truncated": good[: len(good) // 2],
        "one byte short": good[:-1],
        "one byte long": good + b"\0",
        "other schema": good[:3] + b"\x7f" + good[4:],
        "bit flipped": bytes(flipped),
        "huge counts": form.HEADER + pack([2**62] * 8),
        "deep": form.HEADER + pack([*values[: len(values) // 2], *[form.LIST] * 200_000]),
    }


def test_bytes_that_are_no_graph_are_invalid_arguments_by_name(wire: Wire) -> None:
    for name, graph in _hostile_graphs().items():
        code, reason, _ = send_graph(wire, graph)
        assert code is grpc.StatusCode.INVALID_ARGUMENT, name
        assert reason in GRAPH_REASONS, f"{name}: {reason}"


def test_an_operator_outside_the_table_is_refused_by_name(wire: Wire) -> None:
    good = silu_graph(1).encoded.data
    name = b"torch.nn.functional.silu"
    assert good.count(name) == 1
    code, reason, _ = send_graph(wire, good.replace(name, b"torch.nn.functional.evil"))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "TARGET_OP_UNKNOWN")


def test_announced_sizes_beyond_the_limit_are_refused_before_anything_is_sent(wire: Wire) -> None:
    fields = fields_for(b"a graph")
    for size in (0, 4 * 1024 * 1024 + 1, 2**40, 2**64 - 1):
        (start, *_) = compile_messages(fields, b"a graph", graph_bytes=size)
        code, reason, answers = wire.call("Compile", [start.SerializeToString()])
        assert code is grpc.StatusCode.INVALID_ARGUMENT, size
        assert reason in ("GRAPH_TOO_LARGE", "GRAPH_MALFORMED"), size
        assert not answers, size


def test_a_target_that_nobody_builds_for_is_refused_by_name(wire: Wire) -> None:
    graph = silu_graph(1).encoded.data
    raw = [message.SerializeToString() for message in compile_messages(fields_for(graph, "sm_90"), graph)]
    code, reason, _ = wire.call("Compile", raw)
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "TARGET_UNAVAILABLE")


def test_containers_that_do_not_fit_their_manifest_are_not_imported(
    wire: Wire, stored: tuple[Small, SignedManifest, bytes], trust_dir: Path
) -> None:
    _, signed, content = stored
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    for name, bad in {"bit flipped": bytes(flipped), "truncated": content[:-1], "empty": b""}.items():
        messages = [admin_pb2.ImportRequest(manifest=signed), admin_pb2.ImportRequest(chunk=bad)]
        code, reason, _ = wire.call("Import", [message.SerializeToString() for message in messages])
        assert (code, reason) == (grpc.StatusCode.DATA_LOSS, "DIGEST_MISMATCH"), name
    key = open_trust_folder(environment={"FUSE_CACHE_TRUST_DIR": str(trust_dir)}).signing_key()
    stranger = SigningKey.generate()
    assert stranger.public_key != key.public_key
    for name, other in {
        "a stranger's": stranger.sign(signed.manifest),
        "unsigned": SignedManifest(manifest=signed.manifest),
        "altered": SignedManifest(
            manifest=signed.manifest + b"\x08\x01", signature=signed.signature, public_key=signed.public_key
        ),
    }.items():
        messages = [admin_pb2.ImportRequest(manifest=other), admin_pb2.ImportRequest(chunk=content)]
        code, _, _ = wire.call("Import", [message.SerializeToString() for message in messages])
        assert code is grpc.StatusCode.PERMISSION_DENIED, name
