"""The effect of a PassConfig on one target: which passes run for which ranges. Canonical bytes and hash."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from blake3 import blake3

from fuse_cache.proto.pass_tables import FACTS, PIPELINE, PassFacts
from fuse_cache.proto.request import Range

_MAGIC = b"FCPC\x01"
_HASH_CONTEXT = "fuse-cache 2026-11 resolved pass config v1"
MAX_TOKENS = 2**31 - 1


class PassConfigError(ValueError):
    """A field has a value that is not allowed; the message names the field and what is allowed."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(f"{name}={value!r} is not allowed: use {allowed}")
        self.name = name
        self.allowed = allowed


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """A pass runs for the ranges that lie within [minimum, maximum]. `maximum` None: no upper limit."""

    minimum: int = 1
    maximum: int | None = None

    @property
    def bounded(self) -> bool:
        """Whether the pass depends on the token count at all."""
        return self.minimum > 1 or self.maximum is not None

    def admit(self, compile_range: Range) -> bool:
        """Return whether every size of the range is within the limits. A static piece has no size."""
        if not self.bounded:
            return True
        if compile_range.symbol is None:
            return False
        return self.minimum <= compile_range.lower and (
            self.maximum is None or compile_range.upper <= self.maximum
        )


@dataclass(frozen=True, slots=True)
class PassSwitch:
    """One pass: on or off, why (for people; never hashed), and within which token counts."""

    name: str
    on: bool
    reason: str = field(compare=False)
    limits: TokenLimits = TokenLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedPassConfig:
    """Every pass of the pipeline in order, switched.

    `asked_by_name`, `cudagraph_mode`, `warnings` and `splitting_ops` (where the model may still be cut) tell
    of the wish, not of the effect. They are not encoded: after `decode` the mode is the one that the effect
    implies, the others are empty. A client shows its own.
    """

    switches: tuple[PassSwitch, ...]
    asked_by_name: tuple[str, ...] = field(default=(), compare=False)
    cudagraph_mode: str = field(default="", compare=False)
    warnings: tuple[str, ...] = field(default=(), compare=False)
    splitting_ops: tuple[str, ...] = field(default=(), compare=False)

    def warnings_for(self, ranges: Iterable[Range]) -> tuple[str, ...]:
        """Name the passes that were asked for, are on, and run for none of these ranges."""
        running = {name for compile_range in ranges for name in self.active_passes(compile_range)}
        return tuple(
            f"{FACTS[switch.name].field}=True has no effect: no range lies within "
            f"{describe_limits(switch.limits)}"
            for switch in self.switches
            if switch.on and switch.name in self.asked_by_name and switch.name not in running
        )

    def active_passes(self, compile_range: Range) -> tuple[str, ...]:
        """Return the names of the passes that run for this range, in pipeline order.

        A pass that only serves others (raising, lowering, clean-up) is left out where none of those runs.
        """
        own = {
            s.name for s in self.switches if s.on and FACTS[s.name].field and s.limits.admit(compile_range)
        }
        return tuple(
            switch.name
            for switch in self.switches
            if switch.name in own
            or (switch.on and not FACTS[switch.name].field and _served(FACTS[switch.name], own))
        )

    def reasons(self, compile_range: Range | None = None) -> tuple[tuple[str, bool, str], ...]:
        """Return (pass, on, why) for every pass of the pipeline, for one range where it is given."""
        active = None if compile_range is None else self.active_passes(compile_range)
        rows = []
        for switch in self.switches:
            on, reason = switch.on, switch.reason
            if on and active is not None and switch.name not in active:
                on, reason = False, "range outside " + describe_limits(switch.limits)
                if not switch.limits.bounded:
                    reason = "no pass of this range needs it"
            rows.append((switch.name, on, reason))
        return tuple(rows)

    def default_ranges(self, max_tokens: int) -> tuple[tuple[int, int], ...]:
        """Split [1, max_tokens] where a pass that is on starts or stops to apply."""
        ends = {max_tokens}
        for switch in self.switches:
            if switch.on:
                ends.add(switch.limits.minimum - 1)
                ends.add(switch.limits.maximum or max_tokens)
        inner = sorted(end for end in ends if 1 <= end <= max_tokens)
        starts = [1, *(end + 1 for end in inner[:-1])]
        return tuple(zip(starts, inner, strict=True))

    def encode(self) -> bytes:
        """Return the canonical bytes: the passes with an option that are on, in order, with their limits.

        Those that serve them follow from them.
        """
        on = [switch for switch in self.switches if switch.on and FACTS[switch.name].field]
        out = bytearray(_MAGIC)
        out.append(len(on))
        for switch in on:
            name = switch.name.encode("ascii")
            out.append(len(name))
            out += name
            out += switch.limits.minimum.to_bytes(4, "big")
            out += (switch.limits.maximum or 0).to_bytes(4, "big")
        return bytes(out)

    @staticmethod
    def decode(data: bytes) -> ResolvedPassConfig:
        """Read what `encode` wrote.

        Raises:
            PassConfigError: the bytes are not the one encoding of a configuration that this version knows.
        """
        on: dict[str, TokenLimits] = {}
        try:
            if data[: len(_MAGIC)] != _MAGIC:
                raise PassConfigError("pass_config", data[:8], "bytes of schema 1")
            at = len(_MAGIC) + 1
            for _ in range(data[at - 1]):
                length = data[at]
                name = data[at + 1 : at + 1 + length].decode("ascii")
                at += 1 + length
                minimum, maximum = (int.from_bytes(data[p : p + 4], "big") for p in (at, at + 4))
                at += 8
                on[name] = TokenLimits(minimum, maximum or None)
        except (IndexError, UnicodeDecodeError) as error:
            raise PassConfigError("pass_config", data[:8], "complete bytes") from error
        for name, limits in on.items():
            if name not in FACTS or not FACTS[name].built or not FACTS[name].field:
                raise PassConfigError(
                    "pass_config", name, "passes that this version has: " + ", ".join(_built())
                )
            if not 1 <= limits.minimum <= (limits.maximum or MAX_TOKENS) <= MAX_TOKENS:
                raise PassConfigError(
                    name, (limits.minimum, limits.maximum), "limits from 1 on, lowest first"
                )
        resolved = resolved_from(on)
        if resolved.encode() != data:
            raise PassConfigError("pass_config", data[:8], "the canonical encoding")
        return resolved

    def hash(self) -> bytes:
        """Return the 32-byte digest of the effect."""
        return blake3(self.encode(), derive_key_context=_HASH_CONTEXT).digest()


def resolved_from(on: Mapping[str, TokenLimits]) -> ResolvedPassConfig:
    """Return the configuration in which exactly these passes are on, and those that serve them."""
    switches = {
        facts.name: PassSwitch(
            facts.name,
            facts.name in on,
            "as requested" if facts.built else "not built in this version",
            on.get(facts.name, TokenLimits()),
        )
        for facts in PIPELINE
        if facts.field
    }
    mode = "FULL" if "sequence_parallel" in on else "FULL_AND_PIECEWISE" if on else "NONE"
    return ResolvedPassConfig(switches=add_serving_passes(switches), cudagraph_mode=mode)


def add_serving_passes(switches: Mapping[str, PassSwitch]) -> tuple[PassSwitch, ...]:
    """Return the whole pipeline: the passes with an option as switched, the others as needed."""
    on = {name for name, switch in switches.items() if switch.on}
    ordered = []
    for facts in PIPELINE:
        if facts.field is not None:
            ordered.append(switches[facts.name])
            continue
        wanted_by = _served(facts, on)
        if not wanted_by:
            ordered.append(PassSwitch(facts.name, False, "no pass needs it"))
        elif not facts.built:
            ordered.append(PassSwitch(facts.name, False, "not built in this version"))
        else:
            ordered.append(PassSwitch(facts.name, True, "needed by " + ", ".join(sorted(wanted_by))))
    return tuple(ordered)


def _served(facts: PassFacts, on: set[str]) -> set[str]:
    """Return which of these passes this one, that has no option of its own, runs for."""
    return on & set(facts.serves) if facts.serves else on


def _built() -> Iterable[str]:
    return (facts.name for facts in PIPELINE if facts.built and facts.field)


def describe_limits(limits: TokenLimits) -> str:
    """Return limits as people write them."""
    upper = "..." if limits.maximum is None else str(limits.maximum)
    return f"[{limits.minimum}, {upper}] tokens"
