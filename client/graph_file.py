"""Graph files (`.fcgraph`): a graph as it is sent, with what is asked for it, to be explained later.

A serialised ExplainRequest: plain data, no pickle, no names of the host's. Small: 15 bytes a node.
"""

from __future__ import annotations

from pathlib import Path

from google.protobuf.message import DecodeError

from fuse_cache.client.errors import OptionError
from fuse_cache.proto.compile_pb2 import ExplainRequest
from fuse_cache.proto.errors import RequestError
from fuse_cache.proto.limits import GRAPH_LIMITS, REQUEST_BYTES
from fuse_cache.proto.request import decode_request

SUFFIX = ".fcgraph"


def graph_file(graph: bytes, request: bytes, namespace: str = "") -> bytes:
    """Return the bytes of a graph file."""
    return ExplainRequest(namespace=namespace, graph=graph, request=request).SerializeToString()


def read_graph_file(path: Path) -> ExplainRequest:
    """Read a graph file.

    Raises:
        OptionError: it cannot be read or is none; the message says how to make one.
    """
    how = f"write one with the backend's option dump_dir: request.*{SUFFIX}"
    try:
        if path.stat().st_size > GRAPH_LIMITS.size_bytes + 2 * REQUEST_BYTES:
            raise OptionError(f"{path} is larger than any graph: {how}")
        asked = ExplainRequest.FromString(path.read_bytes())
        decode_request(asked.request)
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror}") from error
    except (DecodeError, RequestError) as error:
        raise OptionError(f"{path} is no graph file ({error}): {how}") from error
    if not asked.graph:
        raise OptionError(f"{path} holds no graph: {how}")
    return asked
