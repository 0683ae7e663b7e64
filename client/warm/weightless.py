"""Makes a model without weights: its parameters are fake tensors, of the right size and without memory."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fuse_cache.client.errors import FuseCacheError
from fuse_cache.client.warm.manifest import ModelPlan


class ModelError(FuseCacheError):
    """A model cannot be made or traced. The message has the reason and what to do."""


def make_model(plan: ModelPlan, device: str) -> nn.Module:
    """Return the plan's model on `device`, in evaluation mode. To be called under a FakeTensorMode.

    Raises:
        ModelError
    """
    with _converted_by_overwriting():
        try:
            with torch.device(device):
                model = _from_factory(plan) if plan.factory is not None else _from_config(plan)
            return model.eval().to(device)
        except ModelError:
            raise
        except Exception as error:  # It is the user's own code that runs here.
            source = plan.factory or plan.hf_config
            raise ModelError(f"{source} raised {type(error).__name__}: {_first_line(error)}") from error


def _from_factory(plan: ModelPlan) -> nn.Module:
    assert plan.factory is not None
    module_name, _, name = plan.factory.partition(":")
    with _importable_from(Path.cwd()):
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise ModelError(f"factory {plan.factory}: {error}; is its folder in PYTHONPATH?") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise ModelError(f"factory {plan.factory}: {module_name} has no function {name}")
    model = factory()
    if not isinstance(model, nn.Module):
        raise ModelError(f"factory {plan.factory} returned a {type(model).__name__}, no torch.nn.Module")
    return model if plan.dtype is None else model.to(getattr(torch, plan.dtype))


def _from_config(plan: ModelPlan) -> nn.Module:
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ModelError("hf_config needs the transformers library: pip install transformers") from error
    # Never code that a configuration names: that of the library alone.
    config = transformers.AutoConfig.from_pretrained(str(plan.hf_config), trust_remote_code=False)
    named = getattr(config, "architectures", None) or []
    kind = getattr(transformers, named[0], None) if named else None
    dtype = {} if plan.dtype is None else {"dtype": getattr(torch, plan.dtype)}
    make: Callable[..., nn.Module] = (
        kind._from_config if kind is not None else transformers.AutoModelForCausalLM.from_config
    )
    return make(config, **dtype)


@contextlib.contextmanager
def _importable_from(folder: Path) -> Iterator[None]:
    """Find modules in `folder` too, after all others: a factory often lies beside its manifest's user."""
    before = list(sys.path)
    sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.path[:] = before


@contextlib.contextmanager
def _converted_by_overwriting() -> Iterator[None]:
    """Let modules take converted fake parameters in the place of their own.

    `Module.to` would swap the two tensors, and a fake one cannot be swapped. Parameters that several modules
    share stay shared, as they do there.
    """
    original = nn.Module._apply
    made: dict[tuple[int, int], tuple[Any, ...]] = {}  # What the ids are of is kept alive beside the result.

    def apply(module: nn.Module, function: Callable[..., Any], recurse: bool = True) -> nn.Module:
        if recurse:
            for child in module.children():
                apply(child, function)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            key = id(parameter), id(function)
            if key not in made:
                with torch.no_grad():
                    new = nn.Parameter(function(parameter), requires_grad=parameter.requires_grad)
                made[key] = new, parameter, function
            module._parameters[name] = made[key][0]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = function(buffer)
        return module

    vars_of_module: Any = nn.Module
    vars_of_module._apply = apply
    try:
        yield
    finally:
        vars_of_module._apply = original


def fake_mode() -> FakeTensorMode:
    """Return a mode in which models are made and traced. What a model holds that is real stays real."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:500]
