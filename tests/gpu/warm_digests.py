"""On a machine with a GPU: what `fuse-cache warm` asks for, without weights and with the GPU hidden, is what
a host with real CUDA tensors asks for, to the byte.

`python tests/gpu/warm_digests.py` prints a JSON line for each model; with a target's name it is the side
without weights, for that process alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Final

import torch

from fuse_cache.client.options import CompileOptions
from fuse_cache.client.target import choose_target
from fuse_cache.client.warm.run import for_device
from fuse_cache.client.warm.tracing import trace
from fuse_cache.proto.gpu_target import GPUS
from fuse_cache.proto.target_facts import requested
from tests.client.warm import its_models
from tests.client.warm.test_tracing import IDS, MASK, NO_CACHE, asked_by_a_host, plan
from tests.models import example_inputs

MODELS: Final = ("llama", "gemma3", "mixtral")
OPTIONS: Final = CompileOptions.from_mapping({"mode": "remote"})


def without_weights(target: str) -> dict[str, list[str]]:
    """Return the request digests of each model, traced on fake tensors."""
    found = {}
    for name in MODELS:
        with for_device(target):
            traced = trace(plan(name, IDS, MASK, NO_CACHE), OPTIONS, [target], "cuda")
        found[name] = [want.request_digest.hex() for want in traced.wants] + traced.refused
    return found


def main() -> None:
    """Compare both sides for each model."""
    own = choose_target("auto", torch.device("cuda", 0), ())
    # A name of the table that means this GPU; else its architecture, and then the facts differ.
    target = next((name for name in GPUS if requested(name) == (own.name, own.facts)), own.name)
    hidden = subprocess.run(
        [sys.executable, __file__, target], capture_output=True, text=True, check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    fake = json.loads(hidden.stdout.splitlines()[-1]) if hidden.returncode == 0 else {}
    for name in MODELS:
        model = getattr(its_models, name)().cuda()
        arguments = example_inputs(model, "dynamic")
        inputs = {key: value.cuda() if torch.is_tensor(value) else value for key, value in arguments.items()}
        for key in ("input_ids", "attention_mask"):
            for dimension in (0, 1):
                torch._dynamo.mark_dynamic(inputs[key], dimension)
        real = [digest.hex() for digest in asked_by_a_host(model, OPTIONS, inputs)]
        told = fake.get(name, hidden.stderr[-600:])
        print(
            json.dumps({"model": name, "target": target, "equal": real == told, "real": real, "fake": told})
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(without_weights(sys.argv[1])))
    else:
        main()
