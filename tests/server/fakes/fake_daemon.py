"""Runs the daemon with a fake build. Options as JSON in the first argument."""

from __future__ import annotations

import json
import sys

from fuse_cache.server.app import run
from fuse_cache.server.config import load_config

if __name__ == "__main__":
    sys.exit(run(load_config(json.loads(sys.argv[1])), entry="fake_builds:build", seed_entry=""))
