"""What `make demo` runs: a daemon, a first host that has an 8-layer Llama compiled, a second that loads it.

Each host is a process of its own with an empty client cache and its own HOME: `demo.py host ENDPOINT`.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

LAYERS = 8
RANGES = [[1, 64], [65, 512]]


def _host(endpoint: str) -> dict[str, Any]:
    """Compile or load the model, run it, compare with eager, and return what happened."""
    started = time.perf_counter()
    import torch

    from fuse_cache.client import report

    transformers: Any = importlib.import_module("transformers")  # Any: its own types take mypy a minute.
    imported = time.perf_counter()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=LAYERS,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=1024,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    options: Any = {"endpoint": endpoint, "mode": "remote", "compile_ranges": RANGES}
    compiled: Any = torch.compile(model, backend="fuse_cache", fullgraph=True, options=options)
    worst = 0.0
    calls = []
    with torch.no_grad():
        for tokens in (48, 1, 64, 65, 512):
            ids = torch.randint(0, config.vocab_size, (1, tokens))
            if tokens > 1:  # Hugging Face branches on a length of 1: that decode step is a graph of its own.
                torch._dynamo.mark_dynamic(ids, 1, min=2, max=RANGES[-1][1])
            began = time.perf_counter()
            logits = compiled(input_ids=ids, use_cache=False).logits
            calls.append(time.perf_counter() - began)
            worst = max(worst, float((logits - model(input_ids=ids, use_cache=False).logits).abs().max()))
    return {
        "import_s": imported - started,
        "first_call_s": calls[0],
        "later_call_s": min(calls[1:]),
        "worst_difference": worst,
        "graphs": report(json=True),
    }


def _run_host(endpoint: str, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    env = {
        **os.environ, "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, __file__, "host", endpoint],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=900,
    )
    if done.returncode:
        raise SystemExit(f"the host failed with exit status {done.returncode}; its message stands above")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    """Run the demonstration and print a table. Exit 1 when the second host compiled or a result is wrong."""
    from tests.daemon import running_daemon

    console = Console()
    with tempfile.TemporaryDirectory(prefix="fuse-cache-demo-") as name:
        folder = Path(name)
        console.print("starting a daemon on an embedded disk store ...")
        with running_daemon(folder / "daemon") as daemon:
            os.environ["FUSE_CACHE_TRUST_DIR"] = daemon.env["FUSE_CACHE_TRUST_DIR"]
            console.print(
                f"first host: an {LAYERS}-layer Llama, {len(RANGES)} ranges, nothing cached anywhere ..."
            )
            first = _run_host(daemon.endpoint, folder / "first")
            console.print("second host: a fresh process with an empty cache folder and another HOME ...")
            second = _run_host(daemon.endpoint, folder / "second")
            stats, entries = daemon.stats(), daemon.entries()
    table = Table("", "first host", "second host", title=f"Llama, {LAYERS} layers")
    for label, field in (
        ("imports", "import_s"),
        ("first call", "first_call_s"),
        ("later call", "later_call_s"),
    ):
        table.add_row(label, f"{first[field]:.3f} s", f"{second[field]:.3f} s")
    table.add_row(
        "largest difference from eager",
        f"{first['worst_difference']:.1e}",
        f"{second['worst_difference']:.1e}",
    )
    for i, (one, two) in enumerate(zip(first["graphs"], second["graphs"], strict=True)):
        table.add_row(f"graph {i} range", str(one["compile_range"]), str(two["compile_range"]))
        table.add_row(f"graph {i} source", one["source"], two["source"])
        table.add_row(
            f"graph {i} fetch and load, or compile", f"{one['seconds']:.3f} s", f"{two['seconds']:.3f} s"
        )
        table.add_row(f"graph {i} fusions", str(one["fusions"]), str(two["fusions"]))
    console.print(table)
    console.print(f"stored: {sum(e['bytes'] for e in entries):,} bytes in {len(entries)} artifacts")
    console.print_json(json.dumps(stats))
    sources = {graph["source"] for graph in second["graphs"]}
    if sources != {"daemon"} or max(first["worst_difference"], second["worst_difference"]) > 1e-3:
        raise SystemExit(f"not as it should be: second host's sources {sorted(sources)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["host"]:
        print(json.dumps(_host(sys.argv[2])))
    else:
        main()
