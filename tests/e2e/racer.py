"""A host without torch: `racer.py ENDPOINT CACHE_DIR WANT.json` asks for one artifact per line of stdin.

A line is a namespace; the answer is one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fuse_cache.client.client import Client
from fuse_cache.client.options import CompileOptions
from fuse_cache.client.verify import Want
from fuse_cache.proto.pass_config import ResolvedPassConfig
from fuse_cache.proto.request import decode_request


def main(endpoint: str, cache_dir: str, job: str) -> None:
    """Answer until stdin ends."""
    found = json.loads(Path(job).read_text())
    fields = decode_request(bytes.fromhex(found["request"]))
    want = Want.of(fields, bytes.fromhex(found["graph"]), ResolvedPassConfig.decode(fields.pass_config))
    for line in sys.stdin:
        options = {
            "endpoint": endpoint,
            "cache_dir": cache_dir,
            "namespace": line.strip(),
            "mode": "remote",
        }
        client = Client(CompileOptions.from_mapping(options))
        (answer,) = client.obtain([want])
        content = answer.artifact.manifest.content.digest.hex() if answer.artifact else ""
        error = str(answer.error or "")
        print(json.dumps({"source": answer.source, "content": content, "error": error}), flush=True)
        client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
