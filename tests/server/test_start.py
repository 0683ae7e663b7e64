"""What `fuse-cache serve` need not import before it answers its first lookup."""

from __future__ import annotations

import subprocess
import sys

# Each took 25 to 120 ms of a start that must be done within a second.
HEAVY = ("torch", "pydantic", "jinja2", "rich.console", "fuse_cache.proto.targets")


def test_a_start_imports_nothing_heavy() -> None:
    code = (
        "import sys, fuse_cache.client.cli.serve, fuse_cache.server.app, fuse_cache.server.daemon\n"
        f"print(*(name for name in {HEAVY!r} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
