"""Writes the golden vectors of a schema version: `python -m tests.proto.write_vectors`. Overwrites none.

A new version of a form gets a new folder; what stands in an old one is read for ever.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import fuse_cache.proto
from fuse_cache.proto.artifact_pb2 import Manifest
from fuse_cache.proto.container import pack
from fuse_cache.proto.content import describe_content
from fuse_cache.proto.digest import FieldDigest
from fuse_cache.proto.graph import Graph
from fuse_cache.proto.graph_codec import encode, graph_digest
from fuse_cache.proto.request import Ambient, Range, RequestFields
from fuse_cache.proto.signing import SigningKey
from tests.proto.graphs import every_part, large

VECTORS = Path(fuse_cache.proto.__path__[0]) / "vectors" / "v1"
# The private key of the vectors. It signs nothing else.
KEY_TEXT = f"fuse-cache-ed25519-private {hashlib.sha256(b'golden vectors').hexdigest()}\n"

REQUESTS = {
    "smallest": RequestFields(graph_digest=bytes(32), pass_config=b"", range=Range(), target="cpu-avx2"),
    "every field": RequestFields(
        graph_digest=bytes(range(32)),
        pass_config=b"FCPC\x01\x00",
        range=Range(symbol=1, lower=257, upper=4096),
        target="sm_90",
        target_facts=(("multiprocessors", 132), ("shared_memory", 232448)),
        inductor_options=(
            ("coordinate_descent_tuning", True),
            ("factor", 1.5),
            ("mode", "default"),
            ("n", -3),
        ),
        attention_backend="flash",
        ambient=Ambient(
            grad_mode=True,
            inference_mode=True,
            autocast=(("cpu", "bfloat16"), ("cuda", "float16")),
            default_dtype="bfloat16",
            deterministic=True,
            deterministic_fill=False,
            float32_matmul_precision="high",
            allow_tf32=True,
            allow_bf16_reduced_precision=False,
            allow_fp16_reduced_precision=False,
            sdpa_backends=("math",),
        ),
    ),
}
SECTIONS = {"aot": b"", "so/0123": bytes(range(256)), "wrapper": b"def call(args):\n    return args\n" * 20}


def graph_vector(name: str, graph: Graph) -> dict[str, Any]:
    """Return a graph's bytes and what a reader must find in them."""
    data = encode(graph)
    return {
        "name": name,
        "bytes": data.hex(),
        "digest": graph_digest(data).hex(),
        "level": int(graph.level),
        "symbols": [[symbol.lower, symbol.upper] for symbol in graph.symbols],
        "inputs": [repr(entry.meta) for entry in graph.inputs],
        "calls": [[node.target, repr(node.args), repr(node.kwargs)] for node in graph.nodes],
        "outputs": repr(graph.outputs),
        "guards": [list(guard.code) for guard in graph.guards],
        "custom_ops": [[schema.name, schema.schema, list(schema.tags)] for schema in graph.op_schemas],
        "groups": [[group.name, group.size] for group in graph.groups],
    }


def request_vector(name: str, request: RequestFields) -> dict[str, Any]:
    """Return a request's bytes and digests."""
    return {
        "name": name,
        "bytes": request.encode().hex(),
        "request_digest": request.request_digest().hex(),
        "family_digest": request.family_digest().hex(),
    }


def manifest_vector() -> dict[str, Any]:
    """Return a signed manifest over the content of the container vector."""
    key = SigningKey.from_text(KEY_TEXT)
    manifest = Manifest(
        schema=1,
        key=bytes(range(32)),
        request_digest=REQUESTS["every field"].request_digest(),
        namespace="default",
        target="sm_90",
        builder=key.builder,
        content=describe_content(pack(SECTIONS)),
        purpose="artifact",
        compile_seconds=12.5,
    )
    signed = key.sign(manifest.SerializeToString(deterministic=True))
    return {
        "private_key": KEY_TEXT.split()[1],
        "public_key": key.public_key.hex(),
        "builder": key.builder,
        "signed_manifest": signed.SerializeToString(deterministic=True).hex(),
        "signature": signed.signature.hex(),
    }


def vectors() -> dict[str, Any]:
    """Return all vectors by file name."""
    content = describe_content(bytes(600_000))
    container = pack(SECTIONS)
    return {
        "graph.json": [graph_vector("every part", every_part()), graph_vector("large", large(40))],
        "request.json": [request_vector(name, request) for name, request in REQUESTS.items()],
        "container.json": {
            "bytes": container.hex(),
            "sections": {name: section.hex() for name, section in SECTIONS.items()},
        },
        "content.json": {
            "zeros": 600_000,
            "digest": content.digest.hex(),
            "chunk_digests": [digest.hex() for digest in content.chunk_digests],
        },
        "manifest.json": manifest_vector(),
        "digest.json": {
            "context": "fuse-cache golden vector v1",
            "digest": FieldDigest("fuse-cache golden vector v1")
            .add_all(
                [
                    ("none", None),
                    ("flag", True),
                    ("n", -1),
                    ("x", 0.5),
                    ("s", "é"),
                    ("b", b"\x00"),
                    ("t", (1, ())),
                ]
            )
            .digest()
            .hex(),
        },
    }


def main() -> None:
    """Write the files that are not there yet."""
    VECTORS.mkdir(parents=True, exist_ok=True)
    for name, content in vectors().items():
        path = VECTORS / name
        if path.exists():
            print(f"{name} stays as it is")
            continue
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{name} written")


if __name__ == "__main__":
    main()
