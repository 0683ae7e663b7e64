"""Reads the one pickle that an artifact carries, by a closed list of names. Never imports torch itself.

What AOTAutograd must remember of a graph (aliases, mutations, views of outputs) has no other form in torch
than a pickle of its own classes. It lies inside signed content; the list is the second fence: a name that
is not on it is refused before anything is imported, and nothing on it runs code of its argument's choosing.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping

_AOT = "torch._functorch._aot_autograd"
# fmt: off
_DTYPES = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16",
    "float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
)
# fmt: on

# module -> names. Data classes and enums of AOTAutograd's runtime metadata, plain containers, dtypes.
ALLOWED: Mapping[str, frozenset[str]] = {
    "builtins": frozenset({"list", "dict", "set", "frozenset", "tuple", "int", "complex", "slice", "range"}),
    "collections": frozenset({"defaultdict", "OrderedDict"}),
    # The symbolic ones name the kind of an output; none is made.
    "torch": frozenset({*_DTYPES, "Size", "SymBool", "SymFloat", "SymInt", "device"}),
    "torch.utils._ordered_set": frozenset({"OrderedSet"}),
    "torch._subclasses.functional_tensor": frozenset({"FunctionalTensor"}),
    f"{_AOT}.aot_autograd_result": frozenset({"BundledAOTAutogradResult"}),
    f"{_AOT}.autograd_cache": frozenset({"BundledAOTAutogradCacheEntry"}),
    f"{_AOT}.functional_utils": frozenset({"ViewMetaSequence"}),
    f"{_AOT}.runtime_wrappers": frozenset(
        {
            "AOTDedupeWrapper",
            "AOTSyntheticBaseWrapper",
            "EffectTokensWrapper",
            "FunctionalizedRngRuntimeWrapper",
        }
    ),
    f"{_AOT}.schemas": frozenset(
        {
            "AOTConfig",
            "CacheableAOTConfig",
            "InputAliasInfo",
            "MemoryFormatMeta",
            "MutationType",
            "OutputAliasInfo",
            "OutputType",
            "PlainTensorMeta",
            "SyntheticBaseInfo",
            "ViewAndMutationMeta",
        }
    ),
}


class ForbiddenNameError(pickle.UnpicklingError):
    """The pickle asks for something that is not on the list."""


def is_allowed(module: str, name: str) -> bool:
    """Tell whether a record may name this."""
    # One class per view operator (`slice_Tensor_ViewMeta`), some fifty: how an output is made from an input
    # again.
    if module == "torch._C._functionalization":
        return name == "InverseReturnMode" or (name.endswith("_ViewMeta") and name.isidentifier())
    return name in ALLOWED.get(module, ())


class _ListedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if not is_allowed(module, name):
            raise ForbiddenNameError(f"{module}.{name} is not on the list")
        return super().find_class(module, name)

    def persistent_load(self, pid: object) -> object:
        raise ForbiddenNameError("persistent references are not allowed")


def loads(data: bytes) -> object:
    """Unpickle `data`, which may name nothing but what `ALLOWED` lists.

    Raises:
        ForbiddenNameError: it names something else.
        pickle.UnpicklingError and others: it is damaged.
    """
    return _ListedUnpickler(io.BytesIO(data)).load()
