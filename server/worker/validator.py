"""The validator: a long-lived process without torch that decodes graphs from outside, under a memory limit.

The daemon itself never parses a graph: four megabytes of empty submessages cost it a hundred. It sends a
descriptor of the spooled file and gets back what the graph is, or why it is none. A graph that kills this
process has killed nothing else; the daemon starts another one.

Packets (SOCK_SEQPACKET, JSON) on standard input. To us: {"id", "bytes"} [the file]. From us, once:
{"event": "ready"}. Then per graph what it is, {"id", "nodes", "inputs", "symbols", "level", "custom_ops"},
or why it is none, {"id", "reason", "message"}.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import sys

from fuse_cache.proto.graph_codec import GraphError, validate
from fuse_cache.proto.limits import GRAPH_LIMITS
from fuse_cache.server.worker import processes

# A graph at its limits (131,072 nodes) decodes to some 100 MB of Python objects, and is encoded once more
# beside them. RLIMIT_AS is exact here, unlike with torch loaded: nothing in this process reserves more than
# it uses.
MEMORY_BYTES = 1 << 30


def check(data: bytes) -> dict[str, object]:
    """Say what a graph is, or why it is none."""
    try:
        summary = validate(data, GRAPH_LIMITS)
    except GraphError as error:
        return {"reason": str(error.reason), "message": str(error)[:1000]}
    except MemoryError:
        limit = f"the validator's memory limit of {MEMORY_BYTES >> 20} MiB"
        return {"reason": "GRAPH_TOO_LARGE", "message": f"the graph needs more than {limit}"}
    return {
        "nodes": summary.nodes,
        "inputs": summary.inputs,
        "symbols": summary.symbols,
        "level": int(summary.level),
        "custom_ops": list(summary.custom_ops),
    }


def serve(daemon: socket.socket) -> None:
    """Answer until the daemon closes its end."""
    processes.send_packet(daemon, {"event": "ready"})
    while (received := processes.receive_packet(daemon)) is not None:
        message, (fd,) = received
        size = message["bytes"]
        assert isinstance(size, int)
        with os.fdopen(fd, "rb") as file:
            data = file.read(min(size, GRAPH_LIMITS.size_bytes + 1))
        processes.send_packet(daemon, {"id": message["id"], **check(data)})


def main(arguments: list[str] | None = None) -> int:
    """Serve the daemon at the other end of standard input."""
    parser = argparse.ArgumentParser(prog="python -m fuse_cache.server.worker.validator")
    parser.add_argument("--parent", type=int, required=True, help="pid of the supervisor")
    parser.add_argument("--memory-bytes", type=int, default=MEMORY_BYTES)
    options = parser.parse_args(arguments)
    processes.die_with_parent(options.parent)
    resource.setrlimit(resource.RLIMIT_AS, (options.memory_bytes, options.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(socket.socket(fileno=0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
