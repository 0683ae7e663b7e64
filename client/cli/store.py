"""`fuse-cache stats | ls | show | rm`: what a daemon holds."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fuse_cache.client.cli.connection import EndpointOption, JsonOption, connect, key_prefix, print_json
from fuse_cache.client.errors import OptionError
from fuse_cache.client.explain.summary import passes_as_dicts
from fuse_cache.proto import admin_pb2
from fuse_cache.proto.artifact_pb2 import CompileRange, Manifest, Toolchain


def stats(endpoint: EndpointOption = None, json: JsonOption = False) -> None:
    """Show a daemon's counters since its start."""
    daemon = connect(endpoint)
    answer = daemon.call(daemon.admin().Stats, admin_pb2.StatsRequest())
    plain: dict[str, Any] = {
        "compiles": answer.compiles,
        "waiting": answer.waiting,
        "lookups": {
            row.tier: {
                "hit": row.hit,
                "miss": row.miss,
                "unavailable": row.unavailable,
                "corrupt": row.corrupt,
            }
            for row in answer.lookups
        },
        "entries": answer.entries,
        "bytes": answer.bytes,
        "evictions": answer.evictions,
        "compile_seconds_spent": answer.compile_seconds_spent,
        "compile_seconds_saved": answer.compile_seconds_saved,
        "status": answer.status,
        "epoch": answer.epoch,
        "targets": list(answer.targets),
        "toolchain": toolchain_as_dict(answer.toolchain),
        "failed_compiles": answer.failed_compiles,
        "rejected_graphs": answer.rejected_graphs,
        "uptime_seconds": answer.uptime_seconds,
        "used_reports": answer.used_reports,
        "bad_reports": answer.bad_reports,
    }
    if json:
        print_json(plain)
        return
    table = Table(title=f"fuse-cache at {daemon.address}", show_header=False)
    for name, value in plain.items():
        if name == "lookups":
            for tier, counts in value.items():
                table.add_row(f"lookups, {tier}", ", ".join(f"{n} {what}" for what, n in counts.items()))
        elif name == "toolchain":
            table.add_row(
                name, f"python {value['python']}, torch {value['torch']}, triton {value['triton'] or '-'}"
            )
        elif name == "bytes":
            table.add_row(name, f"{value:,}")
        else:
            table.add_row(name, f"{value:.1f}" if isinstance(value, float) else _text(value))
    Console().print(table)


def ls(endpoint: EndpointOption = None, json: JsonOption = False) -> None:
    """List the stored artifacts."""
    daemon = connect(endpoint)
    with daemon.errors():
        daemon.await_life()
        entries = list(daemon.admin().List(admin_pb2.ListRequest(), timeout=300, metadata=daemon.metadata))
    rows = [entry_as_dict(entry) for entry in entries]
    if json:
        print_json(rows)
        return
    table = Table("key", "target", "range", "bytes", "compile s", "hits", "nodes", "builder", "created")
    for row in sorted(rows, key=lambda row: str(row["created"])):
        table.add_row(
            row["key"][:12], row["target"], _text(row["compile_range"]), f"{row['bytes']:,}",
            f"{row['compile_seconds']:.1f}", str(row["hits"]), str(row["nodes"]),
            row["builder"][:8], row["created"],
        )  # fmt: skip
    Console().print(table)


def show(
    key: Annotated[str, typer.Argument(help="A key, or 8 or more of its first hex digits.")],
    endpoint: EndpointOption = None,
    json: JsonOption = False,
) -> None:
    """Show one artifact: the parts of its key, its passes, its near misses."""
    daemon = connect(endpoint)
    answer = daemon.call(daemon.admin().Show, admin_pb2.ShowRequest(key_prefix=key_prefix(key)))
    manifest = Manifest.FromString(answer.manifest.manifest)
    plain = {
        **entry_as_dict(answer.entry),
        "request_digest": manifest.request_digest.hex(),
        "content_digest": manifest.content.digest.hex(),
        "content_bytes": manifest.content.size_bytes,
        "cudagraph_mode": manifest.cudagraph_mode,
        "toolchain": toolchain_as_dict(manifest.toolchain),
        "signed": bool(answer.manifest.signature),
        "parts": {field.name: field.value for field in manifest.key_fields},
        "passes": passes_as_dicts(manifest.passes),
        "near_misses": [
            {"pass": getattr(miss, "pass"), "reason": miss.reason, "node": miss.node, "detail": miss.detail}
            for miss in manifest.near_misses
        ],
    }
    if json:
        print_json(plain)
        return
    console = Console()
    facts = Table(title=f"artifact {plain['key']}", show_header=False)
    for name, value in plain.items():
        if name not in ("key", "parts", "passes", "near_misses", "toolchain"):
            facts.add_row(name, _text(value))
    parts = Table("part of the key", "value", title="What the key was made of")
    for field in manifest.key_fields:
        parts.add_row(field.name, field.value)
    passes = Table("pass", "on", "why", "candidates", "matches")
    for record in manifest.passes:
        passes.add_row(
            record.name,
            "yes" if record.on else "no",
            record.reason,
            str(record.candidates),
            str(record.matches),
        )
    for table in (facts, parts, passes):
        console.print(table)
    for miss in manifest.near_misses:
        console.print(
            f"near miss: {getattr(miss, 'pass')} at {miss.node}: {miss.reason} ({miss.detail})", markup=False
        )


def rm(
    key: Annotated[
        list[str] | None, typer.Argument(help="Keys, or 8 or more of their first hex digits.")
    ] = None,
    builder: Annotated[
        str | None, typer.Option(help="Remove all that this builder signed, and revoke it.", metavar="ID")
    ] = None,
    endpoint: EndpointOption = None,
    json: JsonOption = False,
) -> int:
    """Remove artifacts."""
    if not key and builder is None:
        raise OptionError("rm: name a KEY, or a builder with --builder ID")
    prefixes = [key_prefix(item) for item in key or []]
    daemon = connect(endpoint)
    answer = daemon.call(
        daemon.admin().Remove, admin_pb2.RemoveRequest(key_prefixes=prefixes, builder=builder or "")
    )
    if json:
        keys = [removed.hex() for removed in answer.keys]
        print_json({"entries": answer.entries, "bytes": answer.bytes, "keys": keys})
    else:
        Console().print(f"removed {answer.entries} artifacts, {answer.bytes:,} bytes")
    # A builder without entries is still revoked: that is what was asked for.
    return 0 if answer.entries or builder is not None else 1


def entry_as_dict(entry: admin_pb2.Entry) -> dict[str, Any]:
    """Return an entry as `ls --json` prints it."""
    return {
        "key": entry.key.hex(),
        "namespace": entry.namespace,
        "target": entry.target,
        "compile_range": range_as_list(entry.range),
        "bytes": entry.bytes,
        "compile_seconds": entry.compile_seconds,
        "builder": entry.builder,
        "hits": entry.hits,
        "created": datetime.fromtimestamp(entry.created_unix_s, UTC).isoformat(timespec="seconds"),
        "epoch": entry.epoch,
        "model": entry.model,
        "revision": entry.revision,
        "nodes": entry.nodes,
    }


def range_as_list(compile_range: CompileRange) -> list[int] | None:
    """Return [lowest, highest], or None for an artifact without a symbolic size."""
    if not compile_range.symbol_plus_one:
        return None
    return [compile_range.lower, compile_range.upper]


def toolchain_as_dict(toolchain: Toolchain) -> dict[str, str]:
    """Return a toolchain as plain data."""
    return {
        "python": toolchain.python,
        "torch": toolchain.torch,
        "triton": toolchain.triton,
        "cuda": toolchain.cuda,
        "torch_fingerprint": toolchain.torch_fingerprint.hex(),
        "triton_fingerprint": toolchain.triton_fingerprint.hex(),
    }


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "-" if value is None else str(value)
