"""What the option `dump_dir` writes of graphs that a daemon compiles: for people. Changes no compilation.

Local builds write more there, the graph before and after each pass (`passes/dump.py`): passes run elsewhere
leave only what the manifest says of them.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from torch.fx import GraphModule

from fuse_cache.client.graph_file import SUFFIX, graph_file
from fuse_cache.client.reports import GraphReport
from fuse_cache.client.verify import Want
from fuse_cache.proto.artifact_pb2 import Manifest

_log = logging.getLogger("fuse_cache.client")
_NAME_DIGITS = 16  # of a digest, as much of it as the command line asks for


def dump_graph(folder: Path, digest: bytes, gm: GraphModule) -> None:
    """Write the graph that is sent, as Dynamo printed it, to `graph.<digest>.py`."""
    _write(folder, f"graph.{_short(digest)}.py", lambda: gm.print_readable(print_output=False))


def dump_requests(folder: Path, wants: Sequence[Want]) -> None:
    """Write what is asked for each range to `request.<digest>.fcgraph`: `fuse-cache explain fusions` reads
    it."""
    for want in wants:
        data = functools.partial(graph_file, want.graph, want.fields.encode())
        _write_bytes(folder, f"request.{_short(want.request_digest)}{SUFFIX}", data)


def dump_manifest(folder: Path, manifest: Manifest) -> None:
    """Write what the builder says of an artifact to `artifact.<key>.manifest.json`, bytes as hex."""
    name = f"artifact.{_short(manifest.key)}.manifest.json"
    _write(folder, name, lambda: json.dumps(plain(manifest), indent=1))


def dump_reports(folder: Path, reports: Sequence[GraphReport]) -> None:
    """Write `artifact.<key>.report.json` and `artifact.<key>.passes.txt` for each artifact."""
    for report in reports:
        if not report.key:
            continue  # Compiled here, where the passes write for themselves.
        name = f"artifact.{report.key[:_NAME_DIGITS]}"
        _write(folder, f"{name}.report.json", functools.partial(json.dumps, report.as_dict(), indent=1))
        _write(folder, f"{name}.passes.txt", functools.partial(pass_table, report))


def pass_table(report: GraphReport) -> str:
    """Return the passes of one artifact as lines of text: name, on or off, matches of candidates, time, bytes
    saved, why."""
    width = max((len(row["name"]) for row in report.passes), default=0)
    lines = [
        f"{row['name']:<{width}}  {'on ' if row['on'] else 'off'}  {row['matches']:>5}  "
        f"{row['candidates']:>5}  {row['milliseconds']:>8.1f}  {row['bytes_saved']:>11}  {row['reason']}"
        for row in report.passes
    ]
    lines += [f"near miss: {' '.join(filter(None, miss.values()))}" for miss in report.near_misses]
    head = f"{'pass':<{width}}  run  found     of        ms  bytes saved  why"
    return "\n".join([head, *lines]) + "\n"


def plain(message: Message) -> dict[str, Any]:
    """Return the fields of a message that are set, as JSON can hold them: bytes as hex."""
    return {descriptor.name: _value(value) for descriptor, value in message.ListFields()}


def _value(value: Any) -> Any:
    if isinstance(value, Message):
        return plain(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, str | int | float):
        return value
    return [_value(part) for part in value]


def _short(digest: bytes) -> str:
    return digest.hex()[:_NAME_DIGITS]


def _write(folder: Path, name: str, text: Callable[[], str]) -> None:
    _write_bytes(folder, name, lambda: text().encode())


def _write_bytes(folder: Path, name: str, data: Callable[[], bytes]) -> None:
    """Write one file; where that fails, say so: no model goes without its artifact for a dump."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data())
    except Exception as error:  # torch's printer included
        _log.warning("dump_dir: %s was not written: %s: %s", name, type(error).__name__, error)
