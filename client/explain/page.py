"""One self-contained page: the table, what each pass changed as drawings, near misses, patterns.

It runs no script and loads nothing. Every name in it comes from a model or over the wire: the template
escapes all of them, and the page's own policy forbids what a mistake there could do.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jinja2

from fuse_cache.client.explain.advice import group_misses
from fuse_cache.client.explain.drawing import BOX_HEIGHT, Drawing, draw
from fuse_cache.client.explain.summary import COLUMNS, Subject, headline, row
from fuse_cache.proto import compile_pb2 as wire
from fuse_cache.proto.artifact_pb2 import PassRecord

_TEMPLATES = Path(__file__).parent / "templates"
_OPEN_SITES = 3  # Of each pass; the others are folded.


@dataclass(frozen=True, slots=True)
class _Site:
    before: Drawing
    after: Drawing
    times: int
    also_at: tuple[str, ...]
    removed: int
    added: int


def render_page(subject: Subject, response: wire.ExplainResponse) -> str:
    """Return the page as HTML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        subject=subject,
        headline=headline(response),
        columns=COLUMNS,
        rows=[(row(record), _row_class(record)) for record in response.passes],
        changes=[
            (
                getattr(dump, "pass"),
                dump.nodes_before,
                dump.nodes_after,
                [_site(site) for site in dump.sites],
                dump.sites_left_out,
            )
            for dump in response.dumps
        ],
        open_sites=_OPEN_SITES,
        groups=group_misses(response.near_misses),
        patterns=[(field.name, field.value) for field in response.patterns],
        graphs_missing=response.graphs_missing,
        box_height=BOX_HEIGHT,
    )


def _row_class(record: PassRecord) -> str:
    if not record.on:
        return "off"
    return "fused" if record.is_fusion and record.matches else ""


def _site(site: wire.DumpSite) -> _Site:
    return _Site(
        before=draw(site.before),
        after=draw(site.after),
        times=site.times,
        also_at=tuple(site.also_at),
        removed=sum(node.mark == wire.MARK_REMOVED for node in site.before),
        added=sum(node.mark == wire.MARK_ADDED for node in site.after),
    )
