"""A request as texts for people: `show`, `explain miss` and the fields stored beside a manifest."""

from __future__ import annotations

from fuse_cache.proto.pass_resolved import PassConfigError, ResolvedPassConfig, describe_limits
from fuse_cache.proto.request import AMBIENT_NAMES, Range, RequestFields


def describe_request(request: RequestFields) -> list[tuple[str, str]]:
    """Return every field by name; names are unique. A pass that is off has no row."""
    described = [
        ("graph", request.graph_digest.hex()),
        *_describe_passes(request.pass_config),
        ("range", describe_range(request.range)),
        ("target", request.target),
        *((f"target_facts.{name}", str(value)) for name, value in request.target_facts),
        *((f"inductor_options.{name}", str(value)) for name, value in request.inductor_options),
        ("attention_backend", request.attention_backend),
    ]
    for name in AMBIENT_NAMES:
        value = getattr(request.ambient, name)
        if name == "autocast":
            value = ", ".join(f"{device} {dtype}" for device, dtype in value)
        elif isinstance(value, tuple):
            value = ", ".join(value)
        described.append((f"ambient.{name}", str(value)))
    return described


def describe_range(compile_range: Range) -> str:
    """Return a compile range as people write it."""
    if compile_range.symbol is None:
        return "static"
    return f"s{compile_range.symbol} in [{compile_range.lower}, {compile_range.upper}]"


def _describe_passes(pass_config: bytes) -> list[tuple[str, str]]:
    try:
        resolved = ResolvedPassConfig.decode(pass_config)
    except PassConfigError:
        return [("pass_config", f"not known to this version: {pass_config.hex()}")]
    return [
        (f"pass_config.{switch.name}", describe_limits(switch.limits))
        for switch in resolved.switches
        if switch.on
    ]
