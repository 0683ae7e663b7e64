"""The page: well-formed, of one piece, and nothing that comes in as a name gets out of its place."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from fuse_cache.client.explain.advice import ADVICE, group_misses
from fuse_cache.client.explain.page import render_page
from fuse_cache.client.explain.summary import Subject, as_dict, print_summary, size_text
from fuse_cache.passes.base import Reason
from fuse_cache.proto import compile_pb2 as wire
from fuse_cache.proto.artifact_pb2 import CompileRange, KeyField, NearMiss, PassRecord

HOSTILE = (
    "</title></svg><script>alert(1)</script>",
    "\"><img src=x onerror=alert(1)><p class='",
    "{{ 7 * 191 }}{% raw %}",
    "]]><!--",
    "&lt;b&gt;\u202e\x00\x1b[31m",
    "[bold red]markup[/]",
)
VOID = {"meta", "br", "img", "link", "input", "hr"}
ELEMENTS = {
    "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "table", "thead", "tbody", "tr", "th",
    "td", "details", "summary", "b", "ul", "li", "code", "pre", "span", "div", "svg", "g", "rect", "path",
    "text",
}  # fmt: skip
ATTRIBUTES = {
    "lang", "charset", "http-equiv", "content", "name", "class", "open", "style", "role", "width", "height",
    "viewbox", "d", "x", "y", "rx",
}  # fmt: skip


class Checker(HTMLParser):
    """Collects elements, attributes and text, and holds that each element that opens is closed in order."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def checked(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    return checker


def site(name: str = "n", times: int = 1) -> wire.DumpSite:
    def node(place: int, mark: wire.Mark.ValueType) -> wire.DumpNode:
        return wire.DumpNode(
            name=name, call=f"{name}({name})", value=name, mark=mark, inputs=[place - 1] if place else []
        )

    before = [node(0, wire.MARK_KEPT), node(1, wire.MARK_REMOVED), node(2, wire.MARK_REWIRED)]
    after = [node(0, wire.MARK_KEPT), node(1, wire.MARK_ADDED), node(2, wire.MARK_REWIRED)]
    return wire.DumpSite(before=before, after=after, times=times, also_at=[name] * (times - 1))


def dump(name: str, sites: list[wire.DumpSite]) -> wire.GraphDump:
    message = wire.GraphDump(nodes_before=9, nodes_after=8, sites=sites)
    setattr(message, "pass", name)  # A keyword of Python.
    return message


def response(name: str = "n", sites: int = 1) -> wire.ExplainResponse:
    return wire.ExplainResponse(
        passes=[
            PassRecord(
                name=name, on=True, reason=name, candidates=7, matches=5, milliseconds=12.25,
                bytes_saved=3 << 20, is_fusion=True,
            ),
            PassRecord(name="off_one", on=False, reason="not built in this version"),
        ],
        near_misses=[
            NearMiss(reason="extra_view", node=name, detail=name, **{"pass": name}),
            NearMiss(reason=name, node=name, detail=name, **{"pass": name}),
        ],
        dumps=[dump(name, [site(name, 3)] * sites)],
        patterns=[KeyField(name=name, value=f"def f():\n    return {name!r}")],
        target=name,
        nodes=1068,
        range=CompileRange(lower=1, upper=64, symbol_plus_one=1),
    )  # fmt: skip


def test_the_page_has_table_drawings_near_misses_and_patterns() -> None:
    checker = checked(render_page(Subject("abc"), response("mul_1")))
    text = " ".join(checker.text)
    assert "1068 nodes" in text
    assert "3.0 MiB" in text
    assert "12.2" in text
    assert ADVICE["extra_view"] in text
    assert "def f():" in text
    assert "the same change 3 times" in text
    assert checker.elements.count("svg") == 2
    classes = [value for name, value in checker.attributes if name == "class"]
    # A box and its two edges on each side.
    assert classes.count("removed") == classes.count("added") == 3 + 1  # and in the legend
    assert classes.count("rewired") == 2 + 1


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_text(name: str) -> None:
    page = render_page(Subject(name, name), response(name))
    checker = checked(page)
    assert set(checker.elements) <= ELEMENTS
    assert {attribute for attribute, _ in checker.attributes} <= ATTRIBUTES
    assert "1337" not in page
    assert "<script" not in page.lower()
    shown = name.replace("\x00", "\ufffd")
    assert any(shown[:10] in text or name[:10] in text for text in checker.text)


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    page = render_page(Subject("abc"), response())
    assert "default-src 'none'" in page
    assert not re.search(r"https?:|//|@import|url\(|<link|<script|<iframe|\bon\w+=|javascript:", page)


def test_many_sites_stay_a_page_that_opens() -> None:
    big = response("mul_1", sites=400)
    page = render_page(Subject("abc"), big)
    checked(page)
    assert len(page) < 4 << 20
    opened = page.count("<details open>")
    assert opened < 20


def test_edges_that_no_daemon_sends_break_nothing() -> None:
    odd = wire.DumpSite(times=1, before=[wire.DumpNode(name="a", inputs=[0, 5, 4_000_000_000])])
    message = wire.ExplainResponse(dumps=[dump("p", [odd])])
    checked(render_page(Subject("abc"), message))


def test_a_graph_that_is_not_there_is_said_with_what_to_do() -> None:
    told = wire.ExplainResponse(graphs_missing="this daemon no longer has it, use dump_dir")
    assert "use dump_dir" in render_page(Subject("abc"), told)
    assert "use dump_dir" in printed(told)


def printed(message: wire.ExplainResponse, name: str = "abc") -> str:
    out = io.StringIO()
    print_summary(Console(file=out, width=150, highlight=False), Subject(name), message)
    return out.getvalue()


def test_the_terminal_groups_near_misses_by_reason_and_says_what_to_do() -> None:
    misses = [
        NearMiss(reason="extra_user", node=f"view_{number}", detail="two read it", **{"pass": "norm_quant"})
        for number in range(12)
    ]
    text = printed(wire.ExplainResponse(near_misses=misses))
    assert "12 x extra_user (norm_quant)" in text
    assert "view_7 and 4 more" in text
    assert text.count("two read it") == 1
    assert ADVICE["extra_user"][:40] in text


@pytest.mark.parametrize("name", HOSTILE)
def test_the_terminal_takes_no_name_for_markup(name: str) -> None:
    assert name[:6] in printed(response(name), name)


def test_every_reason_has_advice_and_no_other_has() -> None:
    assert set(ADVICE) == {reason.value for reason in Reason}


def test_an_unknown_reason_of_a_newer_daemon_is_shown() -> None:
    (group,) = group_misses([NearMiss(reason="moon_phase", node="a", detail="d")])
    assert "newer daemon" in group.advice


def test_plain_data_holds_what_the_table_does() -> None:
    plain = as_dict(Subject("f.fcgraph"), response("mul_1"))
    assert plain["passes"][0]["bytes_saved"] == 3 << 20
    assert plain["near_misses"][0]["reason"] == "extra_view"
    assert plain["changes"] == [{"pass": "mul_1", "nodes_before": 9, "nodes_after": 8, "sites": 3}]
    assert plain["compile_range"] == [1, 64]


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 30, "5.0 GiB"), (1 << 42, "4096.0 GiB")],
)
def test_bytes_are_written_as_people_read_them(size: int, text: str) -> None:
    assert size_text(size) == text
