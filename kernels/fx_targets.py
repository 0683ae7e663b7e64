"""The closed table of proto/targets.py as callables, both ways: name -> function and function -> name.

No name from outside is walked: it is looked up in the table, or is an operator whose three parts the syntax
check of that table has taken apart.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, Final

import torch

from fuse_cache.proto import targets


class UnknownTarget(LookupError):
    """This process has no such function or operator. `name` is the one asked for."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


@functools.cache
def _functions() -> dict[str, Callable[..., Any]]:
    """Return the functions of the table that this torch has."""
    found: dict[str, Callable[..., Any]] = {}
    for name, target in targets.TARGETS.items():
        function = getattr(importlib.import_module(target.module), target.attribute, None)
        if callable(function):
            found[name] = function
    return found


@functools.cache
def _names() -> dict[int, str]:
    """Return the name of each function by identity. A function with two names has the first of the table."""
    names: dict[int, str] = {}
    for name, function in _functions().items():
        names.setdefault(id(function), name)
    return names


def load_table() -> None:
    """Import what the table names, 5 ms of it, where there is time: the first look-up does it otherwise."""
    _names()


def name_of(target: object) -> str | None:
    """Return the name of a function or operator overload, or None when the table has none for it.

    The functions of the table live as long as the process, so that identity is enough.
    """
    if isinstance(target, torch._ops.OpOverload):
        return f"{target._schema.name}.{target._overloadname}"
    return _names().get(id(target))


def resolve(name: str) -> Callable[..., Any]:
    """Return the callable with this name.

    Raises:
        UnknownTarget: it is not in the table, or this process lacks it (a library that is not imported).
    """
    function = _functions().get(name)
    if function is not None:
        return function
    if name in targets.TARGETS:
        raise UnknownTarget(name, f"torch {torch.__version__} has no {name}")
    return operator_of(name)


def operator_of(name: str) -> torch._ops.OpOverload[..., Any]:
    """Return the operator "namespace::name.overload".

    Raises:
        UnknownTarget: `name` is no operator's, or nothing imported here registers it.
    """
    parts = targets.parse_op(name)
    if parts is None or not (targets.is_torch_op(name) or targets.is_custom_op(name)):
        raise UnknownTarget(name, f"{name!r} is not in the closed table")
    overload = "" if parts.overload == "default" else parts.overload
    # Asked of the dispatcher first: an attribute of torch.ops that is no operator is never touched.
    schemas = torch._C._jit_get_schemas_for_operator(f"{parts.namespace}::{parts.name}")
    if not any(schema.overload_name == overload for schema in schemas):
        raise UnknownTarget(name, f"operator {name} is not registered in this process")
    packet = getattr(getattr(torch.ops, parts.namespace), parts.name)
    found: torch._ops.OpOverload[..., Any] = getattr(packet, parts.overload)
    return found


def overload_of(
    packet: torch._ops.OpOverloadPacket[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the overload that a call of `packet` with these values takes.

    Raises:
        RuntimeError: none takes them.
    """
    names: list[str] = packet.overloads()  # type: ignore[no-untyped-call]  # torch has not typed it
    if len(names) == 1:
        return getattr(packet, names[0])
    name = torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)
    return getattr(packet, name)


def qualified_name(target: object) -> str:
    """Return how people know a callable: for messages, never for the wire."""
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher-order operator {target._name}"
    module = getattr(target, "__module__", None) or getattr(inspect.getmodule(target), "__name__", "?")
    return f"{module}.{getattr(target, '__qualname__', getattr(target, '__name__', type(target).__name__))}"


DTYPES: Final[dict[str, torch.dtype]] = {
    name: value
    for name in sorted(targets.DTYPES)
    if isinstance(value := getattr(torch, name, None), torch.dtype)
}
DTYPE_NAMES: Final[dict[torch.dtype, str]] = {value: name for name, value in DTYPES.items()}
LAYOUTS: Final[dict[str, torch.layout]] = {name: getattr(torch, name) for name in sorted(targets.LAYOUTS)}
LAYOUT_NAMES: Final[dict[torch.layout, str]] = {value: name for name, value in LAYOUTS.items()}
MEMORY_FORMATS: Final[dict[str, torch.memory_format]] = {
    name: getattr(torch, name) for name in sorted(targets.MEMORY_FORMATS)
}
MEMORY_FORMAT_NAMES: Final[dict[torch.memory_format, str]] = {
    value: name for name, value in MEMORY_FORMATS.items()
}
