"""Encoding a 16-layer Llama as a client does on every start: walk, bytes, request digest.

A user pays for the first one of a process; the others show what is left once every table is warm.
"""

from __future__ import annotations

import time

from fuse_cache.client.ambient import capture_ambient
from fuse_cache.client.graph import encode_graph
from fuse_cache.proto.graph_codec import decode
from fuse_cache.proto.limits import GraphLimits
from fuse_cache.proto.pass_config import PassConfig, PassContext
from fuse_cache.proto.request import Range, RequestFields
from tests.bench.row import Row, median_row
from tests.models import build_model, capture, example_inputs

LAYERS = 16
ROUNDS = 30


def measure() -> list[Row]:
    """Time `ROUNDS` encodings of one captured graph, and the validator's share of them."""
    model = build_model("llama", layers=LAYERS)
    captured = capture(model, **example_inputs(model, "dynamic"))
    resolved = PassConfig().resolve(PassContext(target="cpu-avx2"))
    samples, decodes = [], []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        encoded = encode_graph(captured.gm)
        RequestFields(
            graph_digest=encoded.digest,
            pass_config=resolved.encode(),
            range=Range(symbol=0, lower=1, upper=4096),
            target="cpu-avx2",
            ambient=capture_ambient(),
        ).request_digest()
        samples.append((time.perf_counter() - began) * 1e3)
        began = time.perf_counter()
        decode(encoded.data, GraphLimits())
        decodes.append((time.perf_counter() - began) * 1e3)
    nodes = len(captured.gm.graph.nodes)
    what = f"encode + request digest, {LAYERS}-layer Llama, {nodes} nodes"
    return [
        Row(what=f"{what}, first of the process", value=samples[0], unit="ms", bar=20),
        median_row(f"{what}, later ones", samples[1:], "ms", 20),
        median_row("the validator's decoding of it", decodes, "ms"),
        Row(what="its bytes", value=len(encoded.data) / 1e3, unit="kB"),
    ]
