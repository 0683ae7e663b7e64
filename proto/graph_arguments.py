"""Reads the arguments of a graph's nodes."""

from __future__ import annotations

from fuse_cache.proto import graph_format as form
from fuse_cache.proto import targets
from fuse_cache.proto.graph import Argument, Device, Dtype, Group, Layout, MemoryFormat, Ref
from fuse_cache.proto.graph_definitions import DefinitionReader
from fuse_cache.proto.limits import GraphLimits

_SPECIAL: tuple[Argument, ...] = (None, True, False, ...)
_NAMED: dict[int, tuple[type[Dtype] | type[Device] | type[MemoryFormat] | type[Layout], frozenset[str]]] = {
    form.DTYPE: (Dtype, targets.DTYPES),
    form.DEVICE: (Device, targets.DEVICES),
    form.MEMORY_FORMAT: (MemoryFormat, targets.MEMORY_FORMATS),
    form.LAYOUT: (Layout, targets.LAYOUTS),
}


class ArgumentReader(DefinitionReader):
    """Reads arguments, which refer to the values and groups known so far."""

    def __init__(self, tokens: list[int], limits: GraphLimits) -> None:
        super().__init__(tokens, limits)
        self._refs: list[Ref] = []  # one object per value, shared by all that refer to it
        self._groups: dict[str, bool] = {}  # name -> used
        self._arguments_seen = 0

    def _arguments(self, count: int, depth: int) -> list[Argument]:
        """Read `count` arguments of the value that is being made, which is the one after all `_refs`."""
        if count > self._limits.arguments:
            raise form.too_large("arguments", count, self._limits.arguments)
        if depth > self._limits.argument_depth:
            raise form.too_large("levels of nested arguments", depth, self._limits.argument_depth)
        self._arguments_seen += count
        if self._arguments_seen > self._limits.total_arguments:
            raise form.too_large("arguments in all", self._arguments_seen, self._limits.total_arguments)
        take = self._next
        refs = self._refs
        arguments: list[Argument] = []
        for _ in range(count):
            token = take()
            tag = token & 15
            payload = token >> 4
            if tag == form.REF:
                if not 0 < payload <= len(refs):
                    raise form.malformed("a reference that is not to an earlier value")
                arguments.append(refs[-payload])
            elif tag == form.INT:
                arguments.append(self._integer(payload))
            elif tag == form.TUPLE:
                arguments.append(tuple(self._arguments(payload, depth + 1)))
            elif tag == form.LIST:
                arguments.append(self._arguments(payload, depth + 1))
            elif tag == form.SPECIAL:
                if payload >= len(_SPECIAL):
                    raise form.malformed(f"special argument {payload}")
                arguments.append(_SPECIAL[payload])
            elif tag == form.DICT:
                arguments.append(self._dict(payload, depth + 1))
            elif payload:
                raise form.malformed(f"payload of an argument with tag {tag}")
            else:
                arguments.append(self._tagged(tag, depth))
        return arguments

    def _tagged(self, tag: int, depth: int) -> Argument:
        """Read what follows a token that was a tag only."""
        if tag == form.FLOAT:
            return self._float()
        if tag == form.STR:
            return self._string()
        if tag == form.SLICE:
            return slice(*self._arguments(3, depth + 1))
        if tag == form.GROUP:
            name = self._string()
            if name not in self._groups:
                raise form.malformed(f"group {name!r} is not defined")
            self._groups[name] = True
            return Group(name)
        if tag not in _NAMED:
            raise form.malformed(f"argument with tag {tag}")
        kind, names = _NAMED[tag]
        name = self._string()
        if name not in names:
            raise form.malformed(f"{name!r} is no {kind.__name__}")
        return kind(name)

    def _dict(self, count: int, depth: int) -> dict[str, Argument]:
        entries: dict[str, Argument] = {}
        last = None
        for _ in range(self._bounded(count, "arguments", self._limits.arguments)):
            name = self._string()
            if last is not None and name <= last:
                raise form.malformed("a dict that is not in the order of its keys")
            last = name
            (entries[name],) = self._arguments(1, depth)
        if not count and depth > self._limits.argument_depth:
            raise form.too_large("levels of nested arguments", depth, self._limits.argument_depth)
        return entries
