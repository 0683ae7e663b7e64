"""Checks inputs against an artifact's input spec before each call: a wrong one is an error that names it,
not a wild read.

The check must cost next to nothing. Parameters, buffers and constants are checked once and then known by
identity: to read only the address of 150 of them again costs 11 us a call, more than all the rest. One that
got other memory by `parameter.data = ...` is Dynamo's to notice: its guards hold dtype, sizes and strides of
each, and it traces again. Torch 2.11 skips those guards while a module's dictionaries stay the same, so there
they are compared at each call, as Inductor's own code does (tests/client/test_checker.py holds both).

What depends on the symbols (are they in range, do the guards hold, which sizes and strides follow) is worked
out once for each combination of values.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch

from fuse_cache.proto import expression
from fuse_cache.proto.expression import SYMBOL, Dim, ExpressionError, SymExpr
from fuse_cache.proto.graph import Role, SymMeta, TensorMeta
from fuse_cache.proto.spec import ArtifactSpec

# combinations of sizes kept; serving uses a few dozen token counts, and a plan is made again in 50 us
_MAX_PLANS: Final = 256

# What a kernel may take the data pointer of without a second look (see `_has_own_memory`).
_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})

# Whether Dynamo traces again when `parameter.data` is assigned. Of 2.12 nobody has looked.
DYNAMO_SEES_NEW_MEMORY: Final = torch.__version__ >= "2.13"

_TensorPlan: TypeAlias = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]


class InputMismatchError(ValueError):
    """The inputs are not what the artifact was built for. `index` is the input, `dimension` the dimension,
    -1 where none is meant.
    """

    def __init__(self, message: str, *, index: int = -1, dimension: int = -1) -> None:
        super().__init__(message)
        self.index = index
        self.dimension = dimension


class OutsideRangeError(InputMismatchError):
    """A size is outside the interval that the artifact was built for, or breaks one of its guards: another
    artifact may fit.
    """


class InputChecker:
    """Checks the inputs of one artifact. Safe for concurrent use: two threads at worst do the same work
    twice.
    """

    def __init__(self, spec: ArtifactSpec, names: Sequence[str] = ()) -> None:
        """Prepare the check. `names` are the inputs' names, for messages only.

        Raises:
            ValueError: the spec has a symbol that no input tells, or a dtype unknown to this torch.
        """
        self._spec = spec
        self._names = names if len(names) == len(spec.inputs) else ()
        self._count = len(spec.inputs)
        self._sources = [_source(spec, number) for number in range(len(spec.symbols))]
        self._integers = [
            (index, item.meta.value)
            for index, item in enumerate(spec.inputs)
            if isinstance(item.meta, SymMeta) and (index, -1) not in self._sources
        ]
        self._read = _reader([*self._sources, *((index, -1) for index, _ in self._integers)])
        self._plans: dict[tuple[int, ...], tuple[_TensorPlan, ...]] = {}
        metas = [(index, item.meta, item.role) for index, item in enumerate(spec.inputs)]
        tensors = [(index, meta, role) for index, meta, role in metas if isinstance(meta, TensorMeta)]
        self._varying = [(index, meta) for index, meta, role in tensors if not _is_pinned(meta, role)]
        self._pinned = [(index, meta) for index, meta, role in tensors if _is_pinned(meta, role)]
        self._dtypes = {meta.dtype: _dtype(meta.dtype) for _, meta, _ in tensors}
        self._known: list[weakref.ReferenceType[torch.Tensor]] | None = None if self._pinned else []
        self._take_pinned = _taker([index for index, _ in self._pinned])
        self._on_cpu = all(meta.device == "cpu" for _, meta, _ in tensors)

    def __call__(self, args: Sequence[Any]) -> None:
        """Check `args`.

        Raises:
            OutsideRangeError: a symbol's value does not suit this artifact.
            InputMismatchError: an input is not of its form. Nothing was launched.
        """
        if len(args) != self._count:
            raise InputMismatchError(f"{len(args)} inputs, the artifact takes {self._count}")
        try:
            values = self._read(args)
            plan = self._plans.get(values)
            if plan is None:
                plan = self._plan(values)
            for index, dtype, size, stride in plan:
                tensor = args[index]
                if (
                    tensor.dtype is not dtype
                    or tensor.shape != size
                    or tensor.stride() != stride
                    or type(tensor) not in _PLAIN
                    or tensor.is_cpu is not self._on_cpu
                ):
                    self._check_tensor(tensor, index, dtype, size, stride)
        except (AttributeError, TypeError, IndexError) as error:
            raise self._not_of_its_kind(args) from error
        known = self._known
        if known is None or not all(map(operator.is_, self._take_pinned(args), map(operator.call, known))):
            self._check_pinned(args)

    def _plan(self, integers: tuple[int, ...]) -> tuple[_TensorPlan, ...]:
        """Work out what these integers, the symbols' values first, ask of the tensors, and keep it."""
        if any(type(value) is not int for value in integers):
            raise TypeError("an input that should be an integer is none")
        values = integers[: len(self._sources)]
        for number, (symbol, value) in enumerate(zip(self._spec.symbols, values, strict=True)):
            if value < symbol.lower or (symbol.upper is not None and value > symbol.upper):
                index, dimension = self._sources[number]
                upper = "any" if symbol.upper is None else symbol.upper
                place = self._place(index, dimension)
                raise OutsideRangeError(
                    f"{place} is {value}, the artifact is for {symbol.lower} to {upper}",
                    index=index,
                    dimension=dimension,
                )
        for guard in self._spec.guards:
            if not _holds(guard, values):
                shown = ", ".join(f"s{number}={value}" for number, value in enumerate(values))
                raise OutsideRangeError(f"the artifact assumes {guard}, which is not so for {shown}")
        for (index, dim), value in zip(self._integers, integers[len(values) :], strict=True):
            wanted = expression.evaluate(dim, values)
            if value != wanted:
                raise InputMismatchError(f"{self._place(index)} is {value}, not {wanted}", index=index)
        plan = tuple(self._tensor_plan(index, meta, values) for index, meta in self._varying)
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[integers] = plan
        return plan

    def _tensor_plan(self, index: int, meta: TensorMeta, values: tuple[int, ...]) -> _TensorPlan:
        size = tuple(expression.evaluate(dim, values) for dim in meta.size)
        stride = tuple(expression.evaluate(dim, values) for dim in meta.stride)
        return index, self._dtypes[meta.dtype], size, stride

    def _check_pinned(self, args: Sequence[Any]) -> None:
        for index, meta in self._pinned:
            tensor = args[index]
            if not isinstance(tensor, torch.Tensor):
                raise self._not_of_its_kind(args)
            _, dtype, size, stride = self._tensor_plan(index, meta, ())
            self._check_tensor(tensor, index, dtype, size, stride)
        self._known = [weakref.ref(tensor, self._forget) for tensor in self._take_pinned(args)]

    def _forget(self, reference: object) -> None:
        # A dead reference answers None, which an input may be.
        self._known = None

    def _check_tensor(
        self,
        tensor: torch.Tensor,
        index: int,
        dtype: torch.dtype,
        size: tuple[int, ...],
        stride: tuple[int, ...],
    ) -> None:
        """Compare in full, and raise for the first difference that matters."""
        meta = self._spec.inputs[index].meta
        assert isinstance(meta, TensorMeta)
        place = self._place(index)
        if not _has_own_memory(type(tensor)):
            raise InputMismatchError(f"{place} is a {type(tensor).__name__}, not a plain tensor", index=index)
        if tensor.dtype is not dtype:
            raise InputMismatchError(f"{place} is of {tensor.dtype}, not {dtype}", index=index)
        if tensor.device.type != meta.device:
            raise InputMismatchError(f"{place} is on {tensor.device}, not on {meta.device}", index=index)
        if tensor.dim() != len(size):
            raise InputMismatchError(f"{place} has {tensor.dim()} dimensions, not {len(size)}", index=index)
        for dimension, (have, want) in enumerate(zip(tensor.shape, size, strict=True)):
            if have != want:
                raise InputMismatchError(
                    f"dimension {dimension} of {place} is {have}, not {want}",
                    index=index,
                    dimension=dimension,
                )
        if 0 in size:
            return
        for dimension, (have, want) in enumerate(zip(tensor.stride(), stride, strict=True)):
            if have != want and size[dimension] != 1:  # The stride of a dimension of size 1 is never used.
                raise InputMismatchError(
                    f"the stride of dimension {dimension} of {place} is {have}, not {want}",
                    index=index,
                    dimension=dimension,
                )

    def _not_of_its_kind(self, args: Sequence[Any]) -> InputMismatchError:
        for index, (item, value) in enumerate(zip(self._spec.inputs, args, strict=True)):
            wanted: type[Any] = int if isinstance(item.meta, SymMeta) else torch.Tensor
            if not isinstance(value, wanted):
                kind = "an integer" if wanted is int else "a tensor"
                return InputMismatchError(
                    f"{self._place(index)} is a {type(value).__name__}, not {kind}", index=index
                )
            if isinstance(item.meta, TensorMeta) and value.dim() != len(item.meta.size):
                message = f"{self._place(index)} has {value.dim()} dimensions, not {len(item.meta.size)}"
                return InputMismatchError(message, index=index)
        return InputMismatchError("an input is not of its kind")

    def _place(self, index: int, dimension: int = -1) -> str:
        name = f"input {index}" + (f" ({self._names[index]})" if self._names else "")
        return name if dimension < 0 else f"dimension {dimension} of {name}"


def _has_own_memory(kind: type[Any]) -> bool:
    """Tell whether tensors of this type hold their values themselves: a parameter class of an inference
    library does; a DTensor, a quantised or a fake tensor answers each operator with code of its own.
    """
    return kind in _PLAIN or (
        issubclass(kind, torch.Tensor) and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def _is_pinned(meta: TensorMeta, role: Role) -> bool:
    symbolic = any(isinstance(dim, SymExpr) for dim in (*meta.size, *meta.stride))
    return DYNAMO_SEES_NEW_MEMORY and role is not Role.INPUT and not symbolic


def _is_symbol(dim: Dim, number: int) -> bool:
    return isinstance(dim, SymExpr) and dim.code == (SYMBOL, number)


def _holds(guard: SymExpr, values: Sequence[int]) -> bool:
    try:
        return bool(expression.evaluate(guard, values))
    except ExpressionError:
        return False  # a division by zero: these sizes do not fit


def _source(spec: ArtifactSpec, number: int) -> tuple[int, int]:
    """Return the input, and its dimension or -1, from which a symbol's value is read."""
    for index, item in enumerate(spec.inputs):
        if isinstance(item.meta, SymMeta) and _is_symbol(item.meta.value, number):
            return index, -1
    for index, item in enumerate(spec.inputs):
        if isinstance(item.meta, TensorMeta):
            for dimension, dim in enumerate(item.meta.size):
                if _is_symbol(dim, number):
                    return index, dimension
    raise ValueError(f"no input tells the value of symbol {number}")


def _reader(sources: Sequence[tuple[int, int]]) -> Callable[[Sequence[Any]], tuple[int, ...]]:
    if all(dimension < 0 for _, dimension in sources):
        return _taker([index for index, _ in sources])

    def read(args: Sequence[Any]) -> tuple[int, ...]:
        return tuple(
            args[index] if dimension < 0 else args[index].size(dimension) for index, dimension in sources
        )

    return read


def _taker(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that picks these items as a tuple."""
    if not indices:
        return lambda args: ()
    if len(indices) == 1:
        (only,) = indices
        return lambda args: (args[only],)
    return operator.itemgetter(*indices)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch {torch.__version__}")
    return dtype
