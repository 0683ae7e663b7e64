"""Turns the Python that Inductor wrote into the Python that an artifact carries.

Kernels become lookups by digest, comments (they quote the user's files) go, and so do the parts that only a
benchmark or a compiling host needs, and the size checks of inputs, which the host does from the input spec
before the call. What a host executes then imports torch and nothing of the compiler.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence

from fuse_cache.server.worker.device_index import DEVICE_INDEX, unbind_device
from fuse_cache.server.worker.errors import NotCacheable
from fuse_cache.server.worker.gpu_kernels import GPU_KERNEL

# The loader puts these into the namespace (client/loader.py).
NATIVE_KERNEL = "native_kernel"
EXTERN_KERNELS = "extern_kernels"
STREAM = "get_raw_stream"
PROVIDED = frozenset({NATIVE_KERNEL, EXTERN_KERNELS, GPU_KERNEL, STREAM, DEVICE_INDEX})

# Modules that carried source may import: Python's own for numbers, and torch. The compiler's own modules
# are named one by one.
IMPORTABLE = frozenset(
    {
        "torch",
        "torch._C",
        "torch._C._dynamo.guards",
        "math",
        "cmath",
        "ctypes",
        "torch._inductor.codegen.memory_planning",
    }
)

_INPUT_CHECKS = frozenset({"assert_size_stride", "assert_alignment"})

# Compiles a kernel from its argument types and C++ source, and returns the digest by which it is carried.
CarryKernel = Callable[[Sequence[str], str], str]
# Carries the Triton kernel of a name, and returns the statements that define it.
CarryGpuKernel = Callable[[str], list[ast.stmt]]


def carried_source(
    source: str, carry_kernel: CarryKernel, carry_gpu_kernel: CarryGpuKernel | None = None
) -> str:
    """Return the source that an artifact carries in place of Inductor's `source`. No number of a device is
    left in it.

    Raises:
        NotCacheable: the source needs something that cannot be carried.
    """
    tree = ast.parse(source)
    body = [
        carried for statement in tree.body for carried in _carry(statement, carry_kernel, carry_gpu_kernel)
    ]
    for statement in body:
        _strip_input_checks(statement)
    kept = _needed(body, {"call"})
    for statement in kept:  # Only now: what is for benchmarks names a device.
        unbind_device(statement)
    _check_imports(kept)
    return ast.unparse(ast.Module(kept, [])) + "\n"


def _carry(
    statement: ast.stmt, carry_kernel: CarryKernel, carry_gpu_kernel: CarryGpuKernel | None
) -> list[ast.stmt]:
    """Replace `name = async_compile.cpp_pybinding(types, source)` by `name = native_kernel(digest)`, and
    `name = async_compile.triton(name, source, ...)` by what defines the kernel without its source.
    """
    match statement:
        case (
            ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id="async_compile"), attr=kind), args=arguments
                ),
            ) as assign
        ):
            if kind == "triton" and carry_gpu_kernel is not None:
                return carry_gpu_kernel(name)
            if kind != "cpp_pybinding" or len(arguments) != 2:
                raise NotCacheable(f"the compiled code has a kernel of the kind {kind!r}")
            argtypes, code = (ast.literal_eval(argument) for argument in arguments)
            lookup = ast.Call(
                ast.Name(NATIVE_KERNEL, ast.Load()), [ast.Constant(carry_kernel(argtypes, code))], []
            )
            return [ast.copy_location(ast.Assign(assign.targets, lookup), assign)]
    return [statement]


def _strip_input_checks(statement: ast.stmt) -> None:
    for function in ast.walk(statement):
        if isinstance(function, ast.FunctionDef) and function.name == "call":
            inputs = _input_names(function)
            function.body = [step for step in function.body if not _checks_input(step, inputs)]


def _input_names(function: ast.FunctionDef) -> frozenset[str]:
    """Return the names of `a, b, ... = args`, the first thing that `call` does when it has inputs."""
    for step in function.body:
        match step:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Name(id="args")):
                return frozenset(name.id for name in names if isinstance(name, ast.Name))
    return frozenset()


def _checks_input(step: ast.stmt, inputs: frozenset[str]) -> bool:
    match step:
        case ast.Expr(value=ast.Call(func=ast.Name(id=check), args=[ast.Name(id=name), *_])):
            return check in _INPUT_CHECKS and name in inputs
    return False


def _needed(body: Sequence[ast.stmt], wanted: set[str]) -> list[ast.stmt]:
    """Return the statements that define `wanted`, and what those use, in their order."""
    defined = [_defines(statement) for statement in body]
    needed = set(wanted)
    kept: set[int] = set()
    grew = True
    while grew:
        grew = False
        for number, statement in enumerate(body):
            if number not in kept and defined[number] & needed:
                kept.add(number)
                needed |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
                grew = True
    return [_narrowed(body[number], needed) for number in sorted(kept)]


def _defines(statement: ast.stmt) -> set[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {(alias.asname or alias.name).partition(".")[0] for alias in names} - PROVIDED
        case ast.Assign(targets=targets):
            return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
    return set()


def _narrowed(statement: ast.stmt, needed: set[str]) -> ast.stmt:
    """Drop the names of an import that nobody uses."""
    if isinstance(statement, ast.ImportFrom):
        used = [alias for alias in statement.names if (alias.asname or alias.name) in needed]
        return ast.copy_location(ast.ImportFrom(statement.module, used, statement.level), statement)
    return statement


def _check_imports(body: Iterable[ast.stmt]) -> None:
    for statement in body:
        for node in ast.walk(statement):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                if name not in IMPORTABLE:
                    raise NotCacheable(f"the compiled code imports {name}")
