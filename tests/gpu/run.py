"""Everything that needs a GPU, with one command: `python tests/gpu/run.py FOLDER` on a machine that has one.

Builds every content twice, with the GPU hidden and with it; loads both and compares with eager PyTorch;
starts a real daemon, compiles through it from one process and hits from another; and puts `torch.compile` on
this host beside it. `python tests/gpu/run.py FOLDER daemon alone` takes these steps only. Prints JSON lines
and writes them to FOLDER/results.jsonl. Exit status 1: something differed.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch

from fuse_cache.proto.container import unpack
from tests.daemon import running_daemon
from tests.gpu.build_contents import CONTENTS

HERE: Final = Path(__file__).parent
JOBS: Final[list[dict[str, Any]]] = [
    {"model": "llama", "kind": "static"},
    {"model": "llama", "kind": "dynamic"},
    {"model": "qwen3", "kind": "static_cache"},
    {"model": "llama", "kind": "static", "layers": 16},
]


def run(arguments: list[str], folder: Path, *, hidden: bool = False, stdin: str = "") -> list[dict[str, Any]]:
    """Run a script of this folder in a process with caches of its own and return its JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    env = {
        **os.environ, "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "HF_HUB_OFFLINE": "1",
        **({"CUDA_VISIBLE_DEVICES": ""} if hidden else {}),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *arguments], input=stdin, capture_output=True, text=True, env=env, check=False
    )
    (folder / "stderr").write_text(done.stderr)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode and not lines:
        lines = [{"failed": arguments, "stderr": done.stderr[-600:]}]
    return lines


def contents(folder: Path, target: str) -> Iterator[dict[str, Any]]:
    """Build without and with the GPU, compare the two, and run both."""
    script = str(HERE / "build_contents.py")

    def build(job: tuple[str, bool]) -> dict[str, Any]:
        name, hidden = job
        place = folder / ("absent" if hidden else "native")
        (line,) = run([script, target, str(place), name], place / name / "home", hidden=hidden)
        return {"step": "build", "gpu": not hidden, **line}

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        yield from pool.map(build, [(name, hidden) for name in CONTENTS for hidden in (True, False)])
    for name in CONTENTS:
        yield {"step": "equal", "name": name, **compare(folder / "absent" / name, folder / "native" / name)}
    for kind in ("absent", "native"):
        for line in run([str(HERE / "load_contents.py"), str(folder / kind)], folder / f"load-{kind}"):
            yield {"step": "run", "built": kind, **line}


def compare(absent: Path, native: Path) -> dict[str, Any]:
    """Compare two contents: all but which variants of a kernel are in it, which only the GPU could choose."""
    try:
        ours, theirs = (unpack((place / "content").read_bytes()) for place in (absent, native))
    except OSError as error:
        return {"ok": False, "why": str(error)}
    cubins = [{name for name in sections if name.startswith("cubin/")} for sections in (ours, theirs)]
    is_equal = _calls(ours["wrapper"]) == _calls(theirs["wrapper"])
    return {
        "ok": is_equal and cubins[1] <= cubins[0] and ours["aot"] == theirs["aot"],
        "wrapper": is_equal,
        "cubins": [len(names) for names in cubins],
        "others": sorted(cubins[1] - cubins[0]),
    }


def _calls(wrapper: bytes) -> str:
    """Return the part of a wrapper that runs a call."""
    tree = ast.parse(wrapper.decode())
    return "\n".join(ast.unparse(item) for item in tree.body if isinstance(item, ast.ClassDef))


def daemon(folder: Path, target: str) -> Iterator[dict[str, Any]]:
    """Compile through a daemon on this GPU, and hit from another process."""
    with running_daemon(folder / "daemon", "--target", target, "--workers", "2") as served:
        options = {"endpoint": served.endpoint, "mode": "remote"}
        trust = {"FUSE_CACHE_TRUST_DIR": str(served.folder / "trust")}
        os.environ.update(trust)
        for host in ("first", "second"):
            jobs = json.dumps([{**job, "backend": "fuse_cache", "options": options} for job in JOBS])
            began = time.perf_counter()
            for line in run([str(HERE / "host.py")], folder / host, stdin=jobs):
                yield {"step": "daemon", "host": host, **line}
            yield {"step": "daemon", "host": host, "process_s": round(time.perf_counter() - began, 1)}
        yield {"step": "daemon", "log": served.log()[-1500:] if "compiled" not in served.log() else ""}


def alone(folder: Path) -> Iterator[dict[str, Any]]:
    """Let torch.compile do it on this host alone."""
    for number, job in enumerate(JOBS):  # Each in a fresh process with empty caches.
        jobs = json.dumps([{**job, "backend": "inductor"}])
        for line in run([str(HERE / "host.py")], folder / f"alone-{number}", stdin=jobs):
            yield {"step": "alone", **line}


def main(place: str, *steps: str) -> int:
    """Run the steps named, all by default."""
    major, minor = torch.cuda.get_device_capability()
    target = f"sm_{major}{minor}"
    folder = Path(place).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }
    failed = 0
    with (folder / "results.jsonl").open("w") as results:

        def tell(line: dict[str, Any]) -> None:
            nonlocal failed
            failed += line.get("ok") is False or "failed" in line
            text = json.dumps(line)
            print(text, flush=True)
            results.write(text + "\n")

        tell({"step": "machine", **facts})
        if not steps or "contents" in steps:
            for line in contents(folder, target):
                tell(line)
        if not steps or "digests" in steps:
            for line in run([str(HERE / "digests.py")], folder / "digests"):
                tell({"step": "digests", "ok": line.get("equal", False), **line})
        if not steps or "warm" in steps:
            for line in run([str(HERE / "warm_digests.py")], folder / "warm"):
                tell({"step": "warm", "ok": line.get("equal", False), **line})
        if not steps or "daemon" in steps:
            for line in daemon(folder, target):
                tell(line)
        if not steps or "alone" in steps:
            for line in alone(folder):
                tell(line)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
