"""Takes the number of the builder's device out of the Python that Inductor wrote.

A host loads an artifact for the device that is current there.
"""

from __future__ import annotations

import ast
import re
from typing import Final

from fuse_cache.server.worker.errors import NotCacheable

DEVICE_INDEX: Final = "device_index"  # The loader puts it into the wrapper's namespace.
# What Inductor calls with the number of a device alone.
_OF_DEVICE: Final = frozenset({"_DeviceGuard", "set_device", "get_raw_stream", "DeviceGuard", "synchronize"})
_NAMED: Final = re.compile(r"(cuda|hip|xpu):\d+")


class _Unbinder(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in _OF_DEVICE and len(node.args) == 1 and _is_number(node.args[0]):
            node.args = [_index()]
        elif name == "device" and _kind(node) == "cuda":
            if len(node.args) == 2 and _is_number(node.args[1]):
                node.args[1] = _index()
            for keyword in node.keywords:
                if keyword.arg == "index" and _is_number(keyword.value):
                    keyword.value = _index()
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and _NAMED.fullmatch(node.value):
            raise NotCacheable(f"the compiled code names the device {node.value}", stage="seal")
        return node


def unbind_device(statement: ast.stmt) -> None:
    """Replace every number of a device below `statement` by the one that the loader knows.

    Raises:
        NotCacheable: a device is named where it cannot be replaced.
    """
    _Unbinder().visit(statement)
    ast.fix_missing_locations(statement)


def _index() -> ast.expr:
    return ast.Name(DEVICE_INDEX, ast.Load())


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


def _kind(node: ast.Call) -> object:
    """Return the type in `device("cuda", 0)` or `device(type="cuda", index=0)`."""
    values = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "type")]
    return values[0].value if values and isinstance(values[0], ast.Constant) else None
