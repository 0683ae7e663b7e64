"""Measure every bar of this version: `make bench`, or `run.py NAME ...` for some.

Each module of this folder that has `measure() -> list[Row]` is one benchmark. Rows are printed as a table and
written, with the raw samples, the machine and the versions, to results/<name>.json. A bar that is not reached
is printed as such; the exit status stays 0, because a measurement is not a test.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench.row import Row

HERE = Path(__file__).resolve().parent
NAMES = ("encode", "keys", "load", "calls", "hits", "daemon", "memory", "miss", "passes")


def _machine() -> dict[str, object]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
    ).stdout.strip()
    packages = ("torch", "grpcio", "protobuf", "blake3", "diskcache", "transformers")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "cpu": next(
            (
                line.partition(":")[2].strip()
                for line in Path("/proc/cpuinfo").read_text().splitlines()
                if "model name" in line
            ),
            platform.processor(),
        ),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def main(names: list[str]) -> None:
    """Run the named benchmarks, all by default."""
    console = Console()
    table = Table("benchmark", "measured", "value", "bar", "")
    for name in names or NAMES:
        module = importlib.import_module(f"tests.bench.{name}")
        console.print(f"measuring {name} ...", style="dim")
        rows: list[Row] = module.measure()
        report = {
            "command": f"python tests/bench/run.py {name}",
            "machine": _machine(),
            "rows": [dataclasses.asdict(row) | {"reached": row.reached} for row in rows],
        }
        (HERE / "results" / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
        for row in rows:
            verdict = {True: "reached", False: "NOT REACHED", None: ""}[row.reached]
            table.add_row(name, row.what, row.text(), row.bar_text(), verdict)
    console.print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
