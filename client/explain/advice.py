"""What to do about each kind of near miss. The codes are those of `passes/base.py`; a test holds that each
has its words here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fuse_cache.proto.artifact_pb2 import NearMiss

ADVICE: dict[str, str] = {
    "cast_between": (
        "a cast stands in between, and it rounds: quantise the value in the dtype that the norm or "
        "activation returns, or leave the cast out"
    ),
    "other_spelling": (
        "written in a way that no pattern knows: spell it as torch.nn.functional does (rms_norm, silu), "
        "or report it: every spelling of public model code is to be found"
    ),
    "extra_view": "a reshape stands in between: reshape before the norm, or behind the quantisation",
    "extra_user": (
        "something else reads a value that the fusion would do away with: let its readers share one "
        "quantised value, or remove the other reader"
    ),
    "dtype": (
        "no kernel mixes these dtypes: convert the weight once, when it is loaded, to the activations' own"
    ),
    "shape": (
        "the sizes do not fit the kernel, such as a hidden size that is no multiple of the group: choose "
        "another group size for this layer"
    ),
    "size_burnt_in": (
        "a size that was to vary is a constant in the graph: torch._dynamo.mark_dynamic the input before "
        "the first call, and make no int of a size in the model"
    ),
    "range": (
        "outside the token counts for which the pass pays: give other compile_ranges, or the pass's "
        "threshold in pass_config"
    ),
    "target": "not on this target: build for another one, or switch the pass off",
    "op_missing": "no kernel for it on this target yet: nothing to change in the model",
    "guard": "fused, it would not compute what the graph says: the detail names the obstacle",
    "no_partner": "nothing beside it that it could be fused with: no fault of the model's",
}
_UNKNOWN = "a newer daemon's reason: this client has no advice for it"


@dataclass(frozen=True, slots=True)
class MissGroup:
    """The near misses of one pass that have one reason."""

    pass_name: str
    reason: str
    advice: str
    nodes: tuple[str, ...]
    details: tuple[str, ...]  # each once, the most frequent first


def group_misses(misses: Iterable[NearMiss]) -> list[MissGroup]:
    """Return the near misses by pass and reason, the largest groups first."""
    found: dict[tuple[str, str], list[NearMiss]] = {}
    for miss in misses:
        found.setdefault((getattr(miss, "pass"), miss.reason), []).append(miss)
    groups = []
    for (pass_name, reason), members in found.items():
        counts: dict[str, int] = {}
        for miss in members:
            counts[miss.detail] = counts.get(miss.detail, 0) + 1
        groups.append(
            MissGroup(
                pass_name=pass_name,
                reason=reason,
                advice=ADVICE.get(reason, _UNKNOWN),
                nodes=tuple(miss.node for miss in members),
                details=tuple(sorted(counts, key=counts.__getitem__, reverse=True)),
            )
        )
    return sorted(groups, key=lambda group: len(group.nodes), reverse=True)
