"""Recognises calls of vLLM's own operators, by name and argument names, where a process has registered them.

They write into buffers, so that graphs hold them functionalised (`auto_functionalized`, either version): the
call reads each buffer's old value and returns the new one, and every reader of the new value reads a result.
That makes it legal to compute the results in another way, whatever else reads the old values.

What the operators mean, their roundings included, is that of vLLM's CUDA kernels. One thing differs: they
turn a NaN into the largest FP8 code, our operators keep it (DECISIONS/0063).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fuse_cache.kernels.act_and_mul.op import ACT_AND_MUL
from fuse_cache.kernels.act_and_mul.reference import SILU
from fuse_cache.kernels.fused_add_rms_norm.op import FUSED_ADD_RMS_NORM
from fuse_cache.kernels.quant_dynamic.op import QUANT_DYNAMIC
from fuse_cache.kernels.quant_dynamic.reference import LOG2_POWER, NO_POWER, PER_TOKEN, ROW
from fuse_cache.kernels.quant_fp8_static.op import QUANT_FP8_STATIC
from fuse_cache.kernels.rms_norm.op import RMS_NORM
from fuse_cache.kernels.scaling import DIVIDE, RECIPROCAL
from fuse_cache.passes.base import Reason
from fuse_cache.passes.raised import Found, Miss
from fuse_cache.passes.reading import FLOATS, dtype, has_one_element, number, tensor

_V1 = torch.ops.higher_order.auto_functionalized
_V2 = torch.ops.higher_order.auto_functionalized_v2
# The largest value that vLLM scales to: for e4m3fnuz less than the dtype holds.
_LARGEST: Final = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 224.0}
_SMALLEST_SCALE_STEPS: Final = 512.0  # The least scale of a token is 1 / (largest * 512).
_SMALLEST_GROUP_SCALE: Final = 1e-10  # Of groups, before it becomes a power of two.

Arguments: TypeAlias = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class _Raised:
    """The operator that means the same, and for each of its results the buffer that vLLM's writes it to."""

    operator: OpOverload
    arguments: tuple[object, ...]
    written: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Known:
    """An operator of vLLM's: its arguments in order, and what it means for given ones.

    `optional` maps arguments that only some releases have to the one value that changes nothing; None stands
    for any value.
    """

    names: tuple[str, ...]
    read: Callable[[Arguments], _Raised | Miss]
    optional: Mapping[str, object | None]


def candidates(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield every functionalised call of an operator that is known here."""
    for target in (_V1, _V2):
        for node in graph.find_nodes(op="call_function", target=target):
            if isinstance(node.args[0], OpOverload) and _name(node.args[0]) in _KNOWN:
                yield node


def recognise(node: fx.Node) -> Found | Miss | None:
    """Read a functionalised call. None: nothing reads what it computes."""
    target = node.args[0]
    assert isinstance(target, OpOverload)
    known = _KNOWN[_name(target)]
    names = tuple(argument.name for argument in target._schema.arguments)
    if [name for name in names if name not in known.optional] != list(known.names):
        return Miss(
            Reason.OTHER_SPELLING, f"{_name(target)} has the arguments {', '.join(names)}, unknown here"
        )
    results = _results(node, target)
    if isinstance(results, Miss):
        return results
    items, bases = results
    arguments = {
        **{argument.name: argument.default_value for argument in target._schema.arguments},
        **{name: value for name, value in node.kwargs.items() if name in names},
        **bases,
    }
    for name, harmless in known.optional.items():
        value = arguments.get(name)
        value = tuple(value) if isinstance(value, (list, tuple)) else value
        if harmless is not None and value not in (None, harmless):
            return Miss(Reason.OP_MISSING, f"{_name(target)} with {name}={arguments[name]} is not known here")
    if not any(items.values()):
        return None
    read = known.read(arguments)
    if isinstance(read, Miss):
        return read
    return Found(read.operator, read.arguments, tuple(items[name] for name in read.written))


def _name(target: OpOverload) -> str:
    return target._schema.name


def _results(
    node: fx.Node, target: OpOverload
) -> tuple[dict[str, fx.Node | None], dict[str, fx.Node]] | Miss:
    """Return, by written argument, the node of the new value and that of the old one."""
    written = [
        argument.name
        for argument in target._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    bases = {name: node.kwargs.get(name) for name in written}
    order = written
    if node.target == _V2:
        given = node.kwargs["_all_bases"]
        assert isinstance(given, (list, tuple))
        places: dict[str, int] = {}
        for name in written:
            place = node.kwargs.get(f"_{name}_base_index")
            details = [key for key in node.kwargs if key.startswith(f"_{name}_")]
            if not isinstance(place, int) or len(details) > 1:
                return Miss(Reason.EXTRA_VIEW, f"{_name(target)} writes its {name} to a view of a buffer")
            places[name], bases[name] = place, given[place]
        order = sorted(places, key=places.__getitem__)
        if sorted(places.values()) != list(range(len(given))):
            return Miss(Reason.GUARD, f"{_name(target)} writes two results to one buffer")
    olds = {name: base for name, base in bases.items() if isinstance(base, fx.Node)}
    if len(set(olds.values())) < len(written):
        return Miss(Reason.GUARD, f"{_name(target)} writes two results to one buffer")
    items: dict[str, fx.Node | None] = dict.fromkeys(written)
    first = max(1, len(target._schema.returns))
    for user in node.users:
        place = user.args[1] if user.target is operator.getitem else None
        if not isinstance(place, int) or place < first or items[order[place - first]] is not None:
            return Miss(Reason.EXTRA_USER, f"{user.name} takes {_name(target)}'s results another way")
        items[order[place - first]] = user
    return items, olds


def _rows(arguments: Arguments, *names: str) -> str | None:
    """Say what is wrong if these are not all floating-point tensors of one dtype, as vLLM's kernels want."""
    kinds = {dtype(arguments[name]) for name in names}
    if len(kinds) > 1 or not kinds <= FLOATS:
        shown = ", ".join(f"{name} {dtype(arguments[name])}" for name in names)
        return f"vLLM's operator takes one floating-point dtype, not {shown}"
    return None


def _rms_norm(given: Arguments) -> _Raised | Miss:
    if (wrong := _rows(given, "input", "weight", "result")) is not None:
        return Miss(Reason.DTYPE, wrong)
    # One rounding, behind the weight.
    arguments = (given["input"], given["weight"], number(given["epsilon"]), 0.0, *_one_rounding(given))
    return _Raised(RMS_NORM, arguments, ("result",))


def _fused_add_rms_norm(given: Arguments) -> _Raised | Miss:
    if (wrong := _rows(given, "input", "weight", "residual")) is not None:
        return Miss(Reason.DTYPE, wrong)
    tensors = (given["input"], given["residual"], given["weight"])
    attributes = (number(given["epsilon"]), 0.0, *_one_rounding(given), dtype(given["residual"]), True)
    return _Raised(FUSED_ADD_RMS_NORM, (*tensors, *attributes), ("input", "residual"))


def _one_rounding(given: Arguments) -> tuple[torch.dtype | None, ...]:
    """Return weight_dtype, norm_dtype and out_dtype of a norm that is rounded once, at last."""
    kind = dtype(given["input"])
    return None, None, None if kind == torch.float32 else kind


def _silu_and_mul(given: Arguments) -> _Raised | Miss:
    if (wrong := _rows(given, "input", "result")) is not None:
        return Miss(Reason.DTYPE, wrong)
    arguments = (given["input"], None, SILU, None, dtype(given["input"]), None)
    return _Raised(ACT_AND_MUL, arguments, ("result",))


def _encoding(given: Arguments, codes: str) -> tuple[torch.dtype, float] | Miss:
    kind = dtype(given[codes])
    if kind not in _LARGEST or dtype(given["input"]) not in FLOATS:
        return Miss(Reason.DTYPE, f"a quantisation of {dtype(given['input'])} to {kind} is not known here")
    assert kind is not None
    return kind, _LARGEST[kind]


def _static(given: Arguments) -> _Raised | Miss:
    encoding = _encoding(given, "result")
    if isinstance(encoding, Miss):
        return encoding
    kind, largest = encoding
    scale = tensor(given["scale"])
    if scale is None or scale.dtype != torch.float32 or not has_one_element(scale):
        shape = None if scale is None else list(scale.shape)
        return Miss(Reason.OP_MISSING, f"a static scale of shape {shape}: only one float32 is known here")
    how = (RECIPROCAL, torch.float32, -largest, largest, kind)
    return _Raised(QUANT_FP8_STATIC, (given["input"], given["scale"], *how), ("result",))


def _per_token(given: Arguments) -> _Raised | Miss:
    encoding = _encoding(given, "result")
    if isinstance(encoding, Miss):
        return encoding
    kind, largest = encoding
    bound = tensor(given["scale_ub"])
    if bound is not None and not (has_one_element(bound) and bound.dtype == torch.float32):
        return Miss(Reason.SHAPE, f"scale_ub is {bound.dtype} {list(bound.shape)}, not one float32")
    least = 1.0 / (largest * _SMALLEST_SCALE_STEPS)
    scales = (PER_TOKEN, None, None, DIVIDE, largest, None, least, NO_POWER)
    codes = (DIVIDE, torch.float32, -largest, largest, kind, ROW)
    return _Raised(QUANT_DYNAMIC, (given["input"], given["scale_ub"], *scales, *codes), ("result", "scale"))


def _per_group(given: Arguments) -> _Raised | Miss:
    encoding = _encoding(given, "output_q")
    if isinstance(encoding, Miss):
        return encoding
    kind, _ = encoding
    value, group, power = tensor(given["input"]), given["group_size"], given["scale_ue8m0"]
    eps, low, high = (number(given[name]) for name in ("eps", "fp8_min", "fp8_max"))
    if value is None or not isinstance(group, int) or None in (eps, low, high) or not isinstance(power, bool):
        return Miss(Reason.OTHER_SPELLING, "an attribute of the group quantisation is no constant")
    if group <= 0 or not statically_known_true(value.shape[-1] % group == 0):
        return Miss(Reason.SHAPE, f"rows of {value.shape[-1]} are no multiple of the group of {group}")
    if dtype(given["output_s"]) != torch.float32:
        return Miss(Reason.DTYPE, f"scales of {dtype(given['output_s'])}: only float32 is known here")
    least, form = (_SMALLEST_GROUP_SCALE, LOG2_POWER) if power else (None, NO_POWER)
    scales = (group, eps, None, DIVIDE, high, None, least, form)
    codes = (RECIPROCAL, torch.float32, low, high, kind, ROW)
    return _Raised(QUANT_DYNAMIC, (given["input"], None, *scales, *codes), ("output_q", "output_s"))


_KNOWN: Final = {
    "_C::rms_norm": _Known(("result", "input", "weight", "epsilon"), _rms_norm, {}),
    "_C::fused_add_rms_norm": _Known(("input", "residual", "weight", "epsilon"), _fused_add_rms_norm, {}),
    "_C::silu_and_mul": _Known(("result", "input"), _silu_and_mul, {}),
    "_C::static_scaled_fp8_quant": _Known(
        ("result", "input", "scale"), _static, {"group_shape": (-1, -1)}
    ),
    "_C::dynamic_per_token_scaled_fp8_quant": _Known(
        ("result", "input", "scale", "scale_ub"), _per_token, {}
    ),
    # How the scales lie is seen from their buffer: what releases call these flags changes nothing.
    "_C::per_token_group_fp8_quant": _Known(
        ("input", "output_q", "output_s", "group_size", "eps", "fp8_min", "fp8_max", "scale_ue8m0"),
        _per_group,
        {"dummy_is_scale_transposed": None, "dummy_is_tma_aligned": None},
    ),
}  # fmt: skip
