"""A warm manifest: which models, called with what, for which targets and ranges. Read and checked as a whole,
before anything is traced."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from fuse_cache.client.errors import OptionError
from fuse_cache.client.option_checks import plain_name, printable_text

# Options of the backend that enter the key, by their own names. `ranges` and `targets` stand for two more.
MODEL_OPTIONS: Final = (
    "level", "pass_config", "range_dim", "tp", "max_num_batched_tokens", "dense", "splitting_ops",
    "attention_backend", "inductor",
)  # fmt: skip
_OWN: Final = ("name", "factory", "hf_config", "dtype", "inputs", "ranges", "targets")
_DTYPES: Final = (
    "float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool",
    "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip
_FLOATS: Final = tuple(name for name in _DTYPES if name.startswith(("float", "bfloat")))
Scalar: TypeAlias = bool | int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPlan:
    """One argument of the model, by name: a tensor (`shape`, where a text is a size that varies, and `dtype`)
    or a plain `value`."""

    name: str
    shape: tuple[int | str, ...] = ()
    dtype: str = ""
    value: Scalar | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """One model. `factory` is "module:function", `hf_config` a file; one of them is None. `options` are the
    backend's, as a user writes them; no `targets` means all that the daemon builds for."""

    name: str
    factory: str | None
    hf_config: Path | None
    dtype: str | None
    inputs: tuple[InputPlan, ...]
    targets: tuple[str, ...]
    options: Mapping[str, object]


def read_manifest(path: Path) -> tuple[ModelPlan, ...]:
    """Return the models of a manifest.

    Raises:
        OptionError: it cannot be read, or says something that is not allowed; the message names the model.
    """
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror}; name a TOML file with [[model]] tables") from error
    except ValueError as error:
        raise OptionError(f"{path} is no TOML: {error}") from error
    models = table.pop("model", None)
    if table:
        raise OptionError(f"{path}: {next(iter(table))} is not allowed here: a manifest has [[model]] tables")
    if not isinstance(models, list) or not models or not all(isinstance(item, dict) for item in models):
        raise OptionError(f"{path} has no [[model]]: each model is a table of its own")
    plans = []
    for number, item in enumerate(models, 1):
        shown = item.get("name") if isinstance(item.get("name"), str) else f"number {number}"
        try:
            plans.append(_model(item, path.parent))
        except OptionError as error:
            raise OptionError(f"{path}: model {shown}: {error}") from error
    names = [plan.name for plan in plans]
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"{path}: two models are called {name}")
    return tuple(plans)


def _model(table: Mapping[str, Any], folder: Path) -> ModelPlan:
    for name in table:
        if name not in (*_OWN, *MODEL_OPTIONS):
            raise OptionError(f"unknown {name!r}: use {', '.join((*_OWN, *MODEL_OPTIONS))}")
    factory, hf_config = table.get("factory"), table.get("hf_config")
    if (factory is None) == (hf_config is None):
        raise OptionError('give one of factory = "module:function" and hf_config = "config.json"')
    if factory is not None:
        module, _, function = factory.partition(":") if isinstance(factory, str) else ("", "", "")
        if not module or not function:
            raise OptionError(f'factory = {factory!r} is wrong: use "module:function"')
    elif not isinstance(hf_config, str) or not (folder / hf_config).is_file():
        found = folder / str(hf_config)
        raise OptionError(f"hf_config = {hf_config!r}: no file {found}; a path is relative to the manifest")
    options = {name: table[name] for name in MODEL_OPTIONS if name in table}
    if "ranges" in table:
        options["compile_ranges"] = table["ranges"]
    inputs = tuple(_input(item) for item in _list(table, "inputs"))
    if not any(item.value is None for item in inputs):
        raise OptionError(
            'inputs: give at least one {name = "input_ids", shape = ["batch", 128], dtype = "int64"}'
        )
    return ModelPlan(
        name=_printable(table),
        factory=factory,
        hf_config=folder / hf_config if isinstance(hf_config, str) else None,
        dtype=None if "dtype" not in table else _one_of("dtype", table["dtype"], _FLOATS),
        inputs=inputs,
        targets=tuple(plain_name("targets", item) for item in _list(table, "targets", may_lack=True)),
        options=options,
    )


def _printable(table: Mapping[str, Any]) -> str:
    if "name" not in table:
        raise OptionError("it has no name")
    return printable_text("name", table["name"])


def _input(item: object) -> InputPlan:
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        raise OptionError(f"inputs: {item!r} has no name, which is that of an argument of the model")
    name = item["name"]
    kinds = {"name", "value"} if "value" in item else {"name", "shape", "dtype"}
    if set(item) != kinds:
        raise OptionError(f"inputs: {name}: give {' and '.join(sorted(kinds - {'name'}))}, and nothing else")
    if "value" in item:
        if not isinstance(item["value"], bool | int | float | str):
            raise OptionError(f"inputs: {name}: value = {item['value']!r} is no truth value, number or text")
        return InputPlan(name=name, value=item["value"])
    shape = item["shape"]
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise OptionError(
            f"inputs: {name}: shape = {shape!r} is wrong: use sizes, and names for those that vary: "
            '["batch", 128]'
        )
    return InputPlan(
        name=name, shape=tuple(shape), dtype=_one_of(f"inputs: {name}: dtype", item["dtype"], _DTYPES)
    )


def _is_size(size: object) -> bool:
    return (type(size) is int and size >= 0) or (isinstance(size, str) and size.isidentifier())


def _one_of(name: str, value: object, known: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in known:
        raise OptionError(f"{name} = {value!r} is wrong: use one of {', '.join(known)}")
    return value


def _list(table: Mapping[str, Any], name: str, *, may_lack: bool = False) -> list[Any]:
    value = table.get(name, [] if may_lack else None)
    if not isinstance(value, list):
        raise OptionError(f"{name} must be a list" if name in table else f"it has no {name}")
    return value
