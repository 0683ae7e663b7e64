"""Symbolic sizes as people write them. Nothing parses these texts."""

from __future__ import annotations

from typing import Final

from fuse_cache.proto.expression import LEAVES, UNARY, VARIADIC, Dim, Op, SymExpr

_SIGNS: Final[dict[int, str]] = {
    Op.ADD: " + ", Op.MUL: "*", Op.POW: "**", Op.FLOORDIV: "//", Op.MOD: " % ", Op.PYTHONMOD: " % ",
    Op.EQ: " == ", Op.NE: " != ", Op.LT: " < ", Op.LE: " <= ", Op.GT: " > ", Op.GE: " >= ",
    Op.AND: " and ", Op.OR: " or ",
}  # fmt: skip


def to_text(expr: Dim) -> str:
    """Return the expression as people write it, symbols as s0, s1, ..."""
    if not isinstance(expr, SymExpr):
        return str(expr)
    code = expr.code
    stack: list[str] = []
    at = 0
    while at < len(code):
        op = code[at]
        if op in LEAVES:
            stack.append(f"s{code[at + 1]}" if op == Op.SYMBOL else str(code[at + 1]))
            at += 2
            continue
        arity = code[at + 1] if op in VARIADIC else 1 if op in UNARY else 2
        operands = stack[-arity:]
        del stack[-arity:]
        if op in _SIGNS:
            stack.append(f"({_SIGNS[op].join(operands)})")
        elif op in UNARY:
            stack.append(f"{'-' if op == Op.NEG else 'not '}{operands[0]}")
        else:
            stack.append(f"{Op(op).name.lower()}({', '.join(operands)})")
        at += 2 if op in VARIADIC else 1
    text = stack[0]
    return text[1:-1] if op in _SIGNS else text
