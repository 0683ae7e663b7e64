"""Symbolic sizes as flat postfix code over numbered symbols.

`s0 * 2 + 1` is `SymExpr((SYMBOL, 0, INT, 2, MUL, 2, INT, 1, ADD, 2))`: INT and SYMBOL are followed by their operand, ADD,
MUL, MAX, MIN, AND and OR by their arity, the others take a fixed number of values from the stack. Nothing here parses text, and nothing
evaluates code: `evaluate` is a loop over integers.
"""
