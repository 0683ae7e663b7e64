"""Runs the daemon with a fake build: options as JSON, and the folder to take fingerprints from."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fuse_cache.server.app import run
from fuse_cache.server.config import load_config

if __name__ == "__main__":
    config = load_config(json.loads(sys.argv[1]))
    sys.exit(run(config, entry="fake_builds:build", seed_entry="", root=Path(sys.argv[2])))
