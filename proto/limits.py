"""How large anything from outside may be, with the arithmetic. Readers check before they allocate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MIB: Final = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLimits:
    """What a graph may hold. The largest seen, 405B-shaped with 126 layers, has 8,881 nodes in 140 kB."""

    size_bytes: int = 4 * MIB  # 131,072 nodes of 32 bytes; nodes of real models take 13 to 16
    nodes: int = 131_072  # 15 times the largest seen: ATen graphs have 3 times the nodes of a Dynamo graph
    inputs: int = (
        65_536  # 126 layers have 1,140 parameters; mixtures of experts keep one per expert and projection
    )
    outputs: int = 65_536
    symbols: int = 1_024
    expression_code: int = 262_144  # integers in all expressions; 126 layers share a few hundred of 3 to 27
    strings: int = 16_384
    string_bytes: int = 1_024  # one text argument
    schema_bytes: int = 8_192  # one custom operator's schema; the longest of 4,100 in torch has 1,519
    metas: int = 131_072
    rank: int = 64  # torch's own limit for a TensorIterator
    meta_depth: int = 4
    results: int = 4_096  # of one node
    arguments: int = 65_536  # of one node or list: an index list, torch.cat of many
    argument_depth: int = 8  # 3 seen: a tuple of slices
    total_arguments: int = 1_048_576  # of all nodes: 8 a node, 4 seen
    op_schemas: int = 1_024
    guards: int = 1_024
    groups: int = 64


GRAPH_LIMITS: Final = GraphLimits()

REQUEST_BYTES: Final = 64 * 1024  # a resolved PassConfig is below 1 KiB, the rest below 2 KiB
CHUNK_BYTES: Final = 512 * 1024  # gRPC refuses messages above 4 MiB; 64 streams then buffer 32 MiB
INLINE_BYTES: Final = (
    MIB  # a lookup of 1,024 items must not answer with gigabytes: content above it is fetched
)
CONTENT_BYTES: Final = (
    1024 * MIB
)  # compressed; the largest standalone artifact seen in public reports is 300 MiB
CONTAINER_RAW_BYTES: Final = 4096 * MIB  # unpacked, all sections; a 4:1 ratio over CONTENT_BYTES
CONTAINER_RATIO: Final = 64  # raw to stored, above CONTAINER_SMALL_BYTES; sources and code give 3 to 8
CONTAINER_SMALL_BYTES: Final = 64 * MIB  # what any container may unpack to: a bomb costs no more
CONTAINER_NAME_BYTES: Final = 160  # "so/" and a digest in hex take 67
CONTAINER_SECTIONS: Final = 4_096  # one .so or cubin each; 126 layers compile to some hundred kernels
MANIFEST_BYTES: Final = MIB  # 2,048 chunk digests (1 GiB) take 70 KiB, near misses and key fields the rest
