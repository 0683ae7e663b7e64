"""Builds that take the place of the compiler in tests. A fork server imports this by `--entry
fake_builds:build`.

What a build does is said by the request: a script of words, one action each, run in order. Torch is never
loaded.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from fuse_cache.server.worker.protocol import BuildFailed, Built, Emit, Job

CONTENT = b"an artifact made of "


def build(job: Job, emit: Emit) -> Built:
    """Do what the script in the request says, then return a content that names the graph."""
    return run_script(script_of(job.request), job, emit)


def script_of(request: bytes) -> str:
    """Return the script: what stands after "script=" up to the next ";"."""
    _, found, rest = request.partition(b"script=")
    return rest.partition(b";")[0].decode() if found else ""


def run_script(script: str, job: Job, emit: Emit) -> Built:
    """Run a script such as "note:/tmp/x sleep:0.5 die"."""
    size_bytes = 0
    for word in script.split():
        action, _, value = word.partition(":")
        emit("inductor", word)
        if action == "sleep":
            time.sleep(float(value))
        elif action == "wait":  # until the file exists
            while not Path(value).exists():
                time.sleep(0.01)
        elif action == "note":  # one line per build in the file
            with Path(value).open("a") as file:
                file.write(f"{os.getpid()}\n")
        elif action == "order":
            path, _, mark = value.rpartition(":")
            with Path(path).open("a") as file:
                file.write(f"{mark}\n")
        elif action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "exit":
            os._exit(int(value))
        elif action == "print":
            print(value, flush=True)
        elif action == "fail":
            raise BuildFailed(value, f"the fake compiler refuses: {value}")
        elif action == "raise":
            raise ValueError("the fake compiler raised")
        elif action == "hog":  # touch so many MiB
            hog = mmap.mmap(-1, int(value) << 20)
            for offset in range(0, len(hog), mmap.PAGESIZE):
                hog[offset] = 1
            time.sleep(60)
        elif action == "loop":
            while True:
                pass
        elif (
            action == "children"
        ):  # a compiler that holds our pipe, one that left our group, and one that left us too
            sleeper = [sys.executable, "-c", "import time; time.sleep(600)  # fake-build-child"]
            subprocess.Popen(sleeper, close_fds=False)
            subprocess.Popen(sleeper, start_new_session=True)
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.execv(sleeper[0], sleeper)
                os._exit(0)
        elif action == "bytes":
            size_bytes = int(value)
        elif action == "badjson":
            (job.dir / "content").write_bytes(b"x")
            (job.dir / "built.json").write_text('{"passes": 3}')
            os._exit(0)
    content = CONTENT + job.graph[:32]
    return Built(
        content=content + os.urandom(size_bytes),
        passes=({"name": "norm_quant", "on": True, "reason": "", "matches": 2, "is_fusion": True},),
        near_misses=({"pass_name": "norm_quant", "reason": "other_spelling", "node": "n", "detail": "d"},),
        nodes=7,
        compile_seconds=1.5,
    )
