"""Values and arguments of an FX graph as plain data: what one of them becomes. `graph.py` walks the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node as FxNode
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fuse_cache.client.symbols import SymbolTable
from fuse_cache.client.unkeyable import UnkeyableGraph
from fuse_cache.kernels.fx_targets import DTYPE_NAMES, LAYOUT_NAMES, MEMORY_FORMAT_NAMES
from fuse_cache.proto.graph import (
    Argument,
    Device,
    Dim,
    Dtype,
    Group,
    Layout,
    MemoryFormat,
    Meta,
    OtherMeta,
    Ref,
    SymMeta,
    TensorMeta,
)
from fuse_cache.proto.targets import DEVICES

_OTHER: Final[dict[type, OtherMeta]] = {
    type(None): OtherMeta("none"),
    bool: OtherMeta("bool"),
    int: OtherMeta("int"),
    float: OtherMeta("float"),
    str: OtherMeta("str"),
    torch.SymBool: OtherMeta("bool"),
    torch.SymFloat: OtherMeta("float"),
}
_UNKNOWN: Final = OtherMeta("unknown")
# Arguments that are plain data already.
_PLAIN: Final[frozenset[type]] = frozenset({int, float, bool, str, type(None), type(...), Group})
_PLAIN_TENSORS: Final = frozenset({Tensor, FakeTensor, torch.nn.Parameter})


def plain_device(device: torch.device) -> str:
    """Return the type of a device without its index.

    Raises:
        UnkeyableGraph: the format has no such device.
    """
    if device.type not in DEVICES:
        raise UnkeyableGraph(f"device {device.type}")
    return device.type


class ValueEncoder:
    """Turns metas and arguments of one graph into plain data. Equal metas become one object."""

    def __init__(self, symbols: SymbolTable) -> None:
        self._symbols = symbols
        self.refs: dict[FxNode, Ref] = {}  # the number of each value, as far as the walk has come
        self._metas: dict[
            tuple[torch.dtype, torch.device, tuple[Dim, ...], tuple[Dim, ...], Dim], TensorMeta
        ] = {}
        # The same by what costs least to look up: each symbolic size by the identity of its expression,
        # negated, which no size is. `_symbols` keeps each of them alive.
        self._metas_by_id: dict[tuple[object, ...], TensorMeta] = {}
        self._sym_metas: dict[Dim, SymMeta] = {}
        self._indices: dict[str, int] = {}  # device type -> the one index that tensors here have
        self._arguments: dict[type, Callable[[Any], Argument]] = {
            FxNode: self._ref,
            **dict.fromkeys(_PLAIN, _same),
            tuple: self.arguments,
            torch.Size: self.arguments,
            list: self._list,
            immutable_list: self._list,
            dict: self._dict,
            immutable_dict: self._dict,
            slice: self._slice,
            torch.dtype: _dtype,
            torch.device: lambda value: Device(plain_device(value)),
            torch.memory_format: lambda value: MemoryFormat(MEMORY_FORMAT_NAMES[value]),
            torch.layout: _layout,
        }

    def argument(self, value: object) -> Argument:
        """Return an argument of a node as plain data.

        Raises:
            UnkeyableGraph: it is of a kind that has no form; the reason names the kind.
        """
        convert = self._arguments.get(type(value))
        if convert is not None:
            return convert(value)
        if isinstance(value, torch.SymInt) and value.node.is_constant():
            return int(value)
        raise UnkeyableGraph(f"an argument of type {type(value).__module__}.{type(value).__qualname__}")

    def arguments(self, values: Sequence[object]) -> tuple[Argument, ...]:
        """Return the positional arguments of a node."""
        refs = self.refs
        argument = self.argument
        # Most arguments are nodes that are known, or plain: a look-up instead of two calls.
        return tuple(
            [
                refs.get(value) or argument(value)  # type: ignore[call-overload]  # `kind` is its type
                if (kind := type(value)) is FxNode
                else value
                if kind in _PLAIN
                else argument(value)
                for value in values
            ]
        )

    def named(self, values: Mapping[str, object]) -> tuple[tuple[str, Argument], ...]:
        """Return the named arguments of a node, in the order of their names.

        A device that is written as a text or a number, "cuda:1" or 1, is a device.
        """
        if not values:
            return ()
        return tuple(
            (name, as_device(value) if name == "device" else self.argument(value))
            for name, value in sorted(values.items())
        )

    def meta(self, value: object) -> Meta:
        """Return what is known of a value.

        Raises:
            UnkeyableGraph: it is a tensor of a kind that has no form, or a size depends on data.
        """
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, torch.SymInt):
            dim = self._symbols.dim(value)
            known = self._sym_metas.get(dim)
            if known is None:
                known = self._sym_metas[dim] = SymMeta(dim)
            return known
        if isinstance(value, tuple | list):
            return tuple([self.meta(part) for part in value])
        return _OTHER.get(type(value), _UNKNOWN)

    def tensor(self, value: Tensor) -> TensorMeta:
        """Return what is known of a tensor, `requires_grad` aside, which matters for inputs only."""
        kind = type(value)
        if kind not in _PLAIN_TENSORS:
            raise UnkeyableGraph(f"a tensor of type {kind.__module__}.{kind.__qualname__}")
        device = value.fake_device if kind is FakeTensor else value.device  # type: ignore[attr-defined]  # it is one
        try:
            parts = (*value.shape, *value.stride(), value.storage_offset())
        except RuntimeError as error:  # Sparse and nested tensors have no strides.
            raise UnkeyableGraph(f"a tensor of layout {value.layout}") from error
        key = (
            value.dtype,
            device,
            *[part if type(part) is int else -id(part.node._expr) for part in parts],
        )
        known = self._metas_by_id.get(key)
        if known is None:
            dims = tuple([part if type(part) is int else self._symbols.dim(part) for part in parts])
            known = self._metas_by_id[key] = self._meta_of(value, device, dims)
        return known

    def _meta_of(self, value: Tensor, device: torch.device, dims: tuple[Dim, ...]) -> TensorMeta:
        rank = len(dims) // 2
        key = (value.dtype, device, dims[:rank], dims[rank:-1], dims[-1])
        known = self._metas.get(key)
        if known is None:
            self._must_be_the_only_one(device)
            known = self._metas[key] = _new_meta(value, *key)
        return known

    def _must_be_the_only_one(self, device: torch.device) -> None:
        """Refuse a second device of one type: without indices, it would be taken for the first."""
        if device.index is None:
            return
        first = self._indices.setdefault(device.type, device.index)
        if first != device.index:
            raise UnkeyableGraph(
                f"tensors on {device.type}:{first} and on {device}; a graph may have one device of a type"
            )

    def _ref(self, value: FxNode) -> Ref:
        try:
            return self.refs[value]
        except KeyError:
            raise UnkeyableGraph(f"a use of {value.op} {value.target}, which was dropped") from None

    def _list(self, value: list[object]) -> list[Argument]:
        return list(self.arguments(value))

    def _dict(self, value: dict[object, object]) -> dict[str, Argument]:
        if not all(isinstance(name, str) for name in value):
            raise UnkeyableGraph("a dict with keys that are no text")
        return {str(name): self.argument(part) for name, part in value.items()}

    def _slice(self, value: slice) -> slice:
        return slice(*self.arguments((value.start, value.stop, value.step)))


def _new_meta(
    value: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    size: tuple[Dim, ...],
    stride: tuple[Dim, ...],
    offset: Dim,
) -> TensorMeta:
    if value.layout is not torch.strided:
        raise UnkeyableGraph(f"a tensor of layout {value.layout}")
    if dtype not in DTYPE_NAMES:
        raise UnkeyableGraph(f"a tensor of {dtype}")
    return TensorMeta(DTYPE_NAMES[dtype], plain_device(device), size, stride, offset)


def _same(value: Argument) -> Argument:
    return value


def _dtype(value: torch.dtype) -> Dtype:
    name = DTYPE_NAMES.get(value)
    if name is None:
        raise UnkeyableGraph(f"{value}")
    return Dtype(name)


def _layout(value: torch.layout) -> Layout:
    name = LAYOUT_NAMES.get(value)
    if name is None:
        raise UnkeyableGraph(f"layout {value}")
    return Layout(name)


def as_device(value: object) -> Argument:
    """Return the device that "cuda:1" or torch.device("cuda", 1) or 1 means, without index; None stays None.

    Raises:
        UnkeyableGraph: it means none.
    """
    if value is None:
        return None
    if isinstance(value, torch.device | str | int):
        return Device(plain_device(torch.device(value)))
    raise UnkeyableGraph(f"a device given as {type(value).__qualname__}")


def value_of(node: FxNode) -> Any:
    """Return the fake value that a graph keeps of a node: Dynamo's or AOTAutograd's."""
    meta = node.meta
    return meta["example_value"] if "example_value" in meta else meta.get("val")


def is_wrapper_subclass(value: object) -> bool:
    """Say whether `value` is a tensor made of tensors (DTensor, a quantised weight)."""
    return isinstance(value, Tensor) and bool(is_traceable_wrapper_subclass(value))
