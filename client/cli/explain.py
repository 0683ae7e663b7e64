"""`fuse-cache explain`: why a lookup missed, and what the passes did to a graph."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from fuse_cache.client.cli.connection import (
    CALL_S,
    EndpointOption,
    JsonOption,
    connect,
    key_prefix,
    print_json,
)
from fuse_cache.client.errors import FuseCacheError, OptionError
from fuse_cache.client.explain.summary import Subject, as_dict, print_summary
from fuse_cache.client.graph_file import read_graph_file
from fuse_cache.proto import admin_pb2
from fuse_cache.proto import compile_pb2 as wire
from fuse_cache.proto.artifact_pb2 import Manifest

# Started by name: the client imports nothing of the server's. Torch is loaded there, not here.
_RUNNER = "fuse_cache.server.worker.explain"
RUN_S = 600.0
_PLAIN_WIDTH = 150  # Of a table that goes to a file or a pipe.


def fusions(
    subject: Annotated[
        str,
        typer.Argument(
            help="A key, or 8 or more of its first hex digits; or a graph file, as dump_dir writes them.",
            metavar="GRAPH_OR_KEY",
        ),
    ],
    html: Annotated[
        Path | None,
        typer.Option(
            help="Also write one page with drawings of what each pass changed, and the patterns.", metavar="F"
        ),
    ] = None,
    dump: Annotated[
        Path | None,
        typer.Option(
            help="Of a graph file: also write the graph before and after each pass, and the patterns.",
            metavar="DIR",
        ),
    ] = None,
    op_module: Annotated[
        list[str] | None,
        typer.Option(help="Module that registers custom operators of a graph file; may be repeated."),
    ] = None,
    endpoint: EndpointOption = None,
    json: JsonOption = False,
) -> int:
    """Show what each pass matched, what it did not match and why, and what to do about it.

    A key is asked of the daemon; a graph file is run through the passes here.
    """
    path = Path(subject)
    if path.is_file():
        found, response = Subject(name=path.name), run_passes(path, op_module or [], dump)
    elif dump is not None:
        raise OptionError("--dump takes a graph file: option dump_dir of the backend writes one")
    else:
        found, response = _stored(subject, endpoint, with_graphs=html is not None)
    if html is not None:
        from fuse_cache.client.explain.page import render_page

        try:
            html.write_text(render_page(found, response), encoding="utf-8")
        except OSError as error:
            raise FuseCacheError(f"{html}: {error.strerror}: name a file that can be written") from error
    if json:
        print_json(as_dict(found, response))
    else:
        is_terminal = sys.stdout.isatty()
        console = Console(highlight=False, width=None if is_terminal else _PLAIN_WIDTH)
        print_summary(console, found, response)
        if html is not None:
            console.print(f"\npage: {html}", markup=False)
    return 0


def miss(
    digest: Annotated[
        str, typer.Argument(help="A request digest, or the first of its hex digits.", metavar="[REQUEST]")
    ] = "",
    endpoint: EndpointOption = None,
    json: JsonOption = False,
) -> int:
    """Show recent misses, and in which fields each differs from the nearest stored artifacts."""
    daemon = connect(endpoint)
    request = wire.ExplainRequest(namespace=daemon.options.namespace, miss_request_digest=b"")
    answer = daemon.call(daemon.compile().Explain, request)
    found = [one for one in answer.misses if one.request_digest.hex().startswith(digest.lower())]
    if json:
        print_json([_miss_as_dict(one) for one in found])
        return 0
    console = Console(highlight=False, soft_wrap=True)
    for one in found:
        console.print(Text(f"miss of request {one.request_digest.hex()[:16]}"), style="bold")
        if not one.nearest:
            console.print("  nothing is stored in this namespace", markup=False)
        for near in one.nearest:
            console.print(Text(f"  nearest: artifact {near.key.hex()[:16]}, but"))
            for field in near.differences:
                console.print(Text(f"    {field.name}: wanted {field.wanted}, stored {field.stored}"))
    if not found:
        console.print("no such miss since the daemon started", markup=False)
    return 0


def _miss_as_dict(one: wire.Miss) -> dict[str, Any]:
    return {
        "request_digest": one.request_digest.hex(),
        "unix_ms": one.unix_ms,
        "fields": {field.name: field.value for field in one.fields},
        "nearest": [
            {
                "key": near.key.hex(),
                "differences": [
                    {"name": field.name, "wanted": field.wanted, "stored": field.stored}
                    for field in near.differences
                ],
            }
            for near in one.nearest
        ],
    }


def run_passes(path: Path, op_modules: list[str], dump: Path | None = None) -> wire.ExplainResponse:
    """Run the passes on a graph file in a process of its own.

    Raises:
        OptionError: it is no graph file.
        FuseCacheError: the passes cannot run on it; the message says why.
    """
    read_graph_file(path)
    with tempfile.TemporaryDirectory(prefix="fuse-cache-explain-") as folder:
        answer = Path(folder) / "response"
        more = [argument for name in op_modules for argument in ("--op-module", name)]
        more += [] if dump is None else ["--dump", str(dump)]
        command = [sys.executable, "-P", "-m", _RUNNER, str(path), str(answer), *more]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=RUN_S, check=False, errors="replace"
            )
        except subprocess.TimeoutExpired as error:
            raise FuseCacheError(f"{path}: the passes took more than {RUN_S:g} s") from error
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
            raise FuseCacheError(f"{path}: the passes cannot run on this graph: {last[0]}")
        return wire.ExplainResponse.FromString(answer.read_bytes())


def _stored(subject: str, endpoint: str | None, *, with_graphs: bool) -> tuple[Subject, wire.ExplainResponse]:
    """Ask the daemon about a stored artifact."""
    try:
        prefix = key_prefix(subject)
    except OptionError as error:
        raise OptionError(f"{subject} is neither a graph file that is there nor a key: {error}") from error
    daemon = connect(endpoint)
    shown = daemon.call(daemon.admin().Show, admin_pb2.ShowRequest(key_prefix=prefix))
    manifest = Manifest.FromString(shown.manifest.manifest)
    request = wire.ExplainRequest(namespace=manifest.namespace, key=manifest.key, with_graphs=with_graphs)
    response = daemon.call(daemon.compile().Explain, request, timeout_s=RUN_S if with_graphs else CALL_S)
    key = manifest.key.hex()
    return Subject(name=key, key=key), response
