"""strict=True: a pass that the user named and that matched nowhere is an error."""

from __future__ import annotations

from collections.abc import Sequence

from fuse_cache.client.errors import FusionMissedError
from fuse_cache.client.options import CompileOptions
from fuse_cache.client.reports import GraphReport
from fuse_cache.proto.pass_config import FACTS


def check_strict(options: CompileOptions, reports: Sequence[GraphReport]) -> None:
    """Hold the passes that `pass_config` switches on by name against what matched in all graphs of one call.

    Raises:
        FusionMissedError: one of them matched nowhere; the message has why it was off, or its near misses.
    """
    asked = [
        name
        for name, facts in FACTS.items()
        if facts.is_fusion and facts.field and getattr(options.pass_config, facts.field) is True
    ]
    missed = [name for name in asked if not any(report.fusions.get(name) for report in reports)]
    if not missed:
        return
    details = []
    for name in missed:
        off = {
            f"{name} is off: {row['reason']}"
            for report in reports
            for row in report.passes
            if row["name"] == name and not row["on"]
        }
        near = [
            f"{miss['pass']} at {miss['node']}: {miss['reason']} ({miss['detail']})"
            for report in reports
            for miss in report.near_misses
            if miss["pass"] == name
        ]
        details += sorted(off) + near[:5]
    raise FusionMissedError(missed, details)
