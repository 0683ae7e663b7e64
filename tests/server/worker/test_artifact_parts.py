"""The parts of an artifact's making that need no compilation: source, guards, errors."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch._inductor.exc import CppCompileError
from torch.utils._sympy import functions
from torch.utils._sympy.functions import FloorDiv, Mod, ModularIndexing, PythonMod

from fuse_cache.proto.expression import Op, SymExpr, combine, evaluate, symbol
from fuse_cache.proto.graph import Symbol
from fuse_cache.server.worker.artifact import _tensor_bytes
from fuse_cache.server.worker.errors import CompilerRaised, NotCacheable, translate
from fuse_cache.server.worker.guards import check_covers_range, encode_guard
from fuse_cache.server.worker.wrapper_source import carried_source

WRAPPER = """
# AOT ID: ['0_inference']
import torch
import os
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels
from torch import device, empty_strided

assert_size_stride = torch._C._dynamo.guards.assert_size_stride
async_compile = AsyncCompile()
cpp_fused_0 = async_compile.cpp_pybinding(['float*'], r'''int main() { /* a comment */ }''')
async_compile.wait(globals())
del async_compile

def call(args):
    arg0_1, arg1_1 = args
    args.clear()
    assert_size_stride(arg0_1, (8, 8), (8, 1), 'input')
    buf0 = torch.ops.aten.topk.default(arg0_1)  # /home/somebody/model.py:12
    assert_size_stride(buf0, (8, 8), (8, 1), 'torch.ops.aten.topk.default')
    extern_kernels.mm(arg0_1, arg1_1, out=buf0)
    cpp_fused_0(buf0)
    return (buf0, )

def benchmark_compiled_module(times=10, repeat=10):
    return os.getcwd()

if __name__ == "__main__":
    benchmark_compiled_module()
"""


def test_kernels_become_lookups_and_what_a_host_does_not_need_goes() -> None:
    seen: list[tuple[list[str], str]] = []

    def carry(argtypes: object, source: str) -> str:
        seen.append((list(argtypes), source))  # type: ignore[call-overload]  # a literal list of the source
        return "d1"

    source = carried_source(WRAPPER, carry)
    assert seen == [(["float*"], "int main() { /* a comment */ }")]
    assert "cpp_fused_0 = native_kernel('d1')" in source
    for gone in (
        "AsyncCompile",
        "import os",
        "device",
        "benchmark",
        "__main__",
        "#",
        "somebody",
        "arg0_1, (8, 8)",
    ):
        assert gone not in source
    assert "assert_size_stride(buf0" in source, "what an operator returns is still checked"


def test_a_kernel_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(NotCacheable, match="'triton'"):
        carried_source(WRAPPER.replace("cpp_pybinding", "triton"), lambda argtypes, source: "d1")


def test_source_that_imports_anything_else_is_refused() -> None:
    changed = WRAPPER.replace("cpp_fused_0(buf0)", "os.getpid()")
    with pytest.raises(NotCacheable, match="imports os"):
        carried_source(changed, lambda argtypes, source: "d1")


CeilDiv: Any = functions.CeilDiv  # Any: torch leaves its constructor untyped.
S, T = sympy.symbols("s t", integer=True, positive=True)
NUMBERS = {S: 0, T: 1}


@pytest.mark.parametrize(
    "expr",
    [
        sympy.Eq(S, T),
        sympy.Ne(S, 1),
        S * T + 2 * S - 3 <= 2**31,
        FloorDiv(S, 3) > CeilDiv(T, 2),
        sympy.Eq(Mod(S, 4), 0),
        sympy.Eq(PythonMod(S - 7, 4), 1),
        ModularIndexing(S, 2, 3) < 2,
        sympy.And(S**2 < 50, sympy.Not(sympy.Eq(T, 4))),
        sympy.Or(sympy.Max(S, T) > 6, sympy.Min(S, T) < 2),
    ],
)
def test_a_guard_means_the_same_as_an_expression(expr: sympy.Basic) -> None:
    encoded = encode_guard(expr, NUMBERS)
    for s in range(1, 12):
        for t in range(1, 12):
            assert bool(evaluate(encoded, (s, t))) == bool(expr.subs({S: s, T: t})), (s, t)


def test_a_guard_that_has_no_encoding_is_refused_by_name() -> None:
    with pytest.raises(NotCacheable, match="sin"):
        encode_guard(sympy.sin(S) < 1, NUMBERS)
    with pytest.raises(NotCacheable, match="no size of an input"):
        encode_guard(sympy.Symbol("u0") < 1, NUMBERS)


def guard(op: Op, left: SymExpr, right: int | SymExpr) -> SymExpr:
    return combine(op, [left, right])


def test_a_size_that_was_burnt_in_does_not_cover_the_range() -> None:
    burnt = guard(Op.EQ, symbol(0), 8)
    with pytest.raises(NotCacheable, match="does not cover size 1 "):
        check_covers_range([burnt], [Symbol(1, 64)], [8], 0)
    check_covers_range([burnt], [Symbol(8, 8)], [8], 0)


def test_equal_sizes_cover_a_range_together() -> None:
    check_covers_range([guard(Op.EQ, symbol(0), symbol(1))], [Symbol(1, 64), Symbol(0, None)], [11, 11], 0)
    with pytest.raises(NotCacheable, match="does not cover size 64"):
        check_covers_range([guard(Op.EQ, symbol(0), symbol(1))], [Symbol(1, 64), Symbol(0, 32)], [11, 11], 0)


def test_sizes_that_divide_by_zero_do_not_fit() -> None:
    multiple = guard(Op.EQ, combine(Op.MOD, [combine(Op.MUL, [symbol(0), 6]), symbol(1)]), 0)
    check_covers_range([multiple], [Symbol(1, 64), Symbol(0, None)], [12, 0], 0)


def test_calls_beyond_32_bit_indices_are_left_to_the_check_of_the_call() -> None:
    square = combine(Op.MUL, [symbol(0), symbol(0)])
    check_covers_range([guard(Op.LE, square, 2**31 - 1)], [Symbol(1, 1 << 20)], [8], 0)
    with pytest.raises(NotCacheable, match="does not cover size 1048576"):
        check_covers_range([guard(Op.LE, square, 2**30)], [Symbol(1, 1 << 20)], [8], 0)


def test_guards_of_other_symbols_do_not_matter_to_the_range() -> None:
    check_covers_range([guard(Op.GT, symbol(1), 1)], [Symbol(1, 64), Symbol(0, None)], [11, 13], 0)
    check_covers_range([guard(Op.GT, symbol(0), 1)], [Symbol(0, None)], [11], None)


class BypassSomething(Exception):
    pass


class Wrapped(Exception):
    def __init__(self, inner: Exception) -> None:
        super().__init__("wrapped")
        self.inner_exception = inner


def test_causes_decide_what_the_client_is_told() -> None:
    assert translate(Wrapped(BypassSomething("closure")), "inductor").reason == "NOT_CACHEABLE"
    assert translate(Wrapped(MemoryError()), "inductor").reason == "OUT_OF_MEMORY"
    assert not translate(FileNotFoundError(2, "No such file", "g++"), "inductor").deterministic
    full = CppCompileError(["g++"], "k.cpp: fatal error: error writing to k.s: No space left on device")
    assert not translate(Wrapped(full), "inductor").deterministic
    assert translate(CppCompileError(["g++"], "k.cpp:1:2: error: expected ';'"), "inductor").deterministic
    inner = NotCacheable("because")
    assert translate(Wrapped(inner), "inductor") is inner
    plain = translate(ValueError("bad"), "inductor")
    assert isinstance(plain, CompilerRaised)
    assert plain.deterministic


def test_a_constant_whose_strides_would_be_lost_is_refused_by_name_and_others_keep_their_bytes() -> None:
    constant = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    assert _tensor_bytes("c0", constant) == b"".join(i.to_bytes(4, "little") for i in range(6))
    with pytest.raises(NotCacheable, match=r"constant c1 is not contiguous: strides \(1, 3\)"):
        _tensor_bytes("c1", constant.t())
