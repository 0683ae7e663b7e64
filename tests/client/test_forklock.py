"""A child never waits for a lock that a thread of its parent held when it forked."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

# A thread of the parent holds the lock while the process forks; the child then uses what it guards.
PARENT = """
import json, os, signal, sys, threading, types
from pathlib import Path
from fuse_cache.client import breaker, channel, client, native, options, remote, reporter, reports, tiers

default = options.CompileOptions()
table = breaker.Breaker()
endpoint = channel.Endpoint("unix:/nowhere", default)
own = remote.Own()
teller = reporter.Reporter(lambda request: None, "default")
memory, disk = tiers.MemoryTier(), tiers.DiskTier(Path(sys.argv[1]))
artifact = types.SimpleNamespace(
    signed=types.SimpleNamespace(SerializeToString=lambda: b"manifest"), content=b"content"
)
LOCKS = {
    "breaker": (table._lock, table.allows),
    "channel": (endpoint._lock, endpoint.lost),
    "clients": (client._clients_lock, lambda: client.shared_client(default)),
    "native": (native._lock, lambda: native._lock.__enter__()),
    "own": (own._lock, own.is_running),
    "reporter": (teller._lock, lambda: teller.used(b"key", b"digest")),
    "reports": (reports._lock, reports.report),
    "memory tier": (memory._lock, lambda: memory.get("scope", b"digest")),
    "disk tier": (disk._lock, lambda: disk.put("scope", b"digest", artifact)),
}
found = {}
for name, (lock, use) in LOCKS.items():
    held = threading.Event()

    def hold(lock=lock, held=held):
        with lock:
            held.set()
            threading.Event().wait()

    threading.Thread(target=hold, daemon=True).start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(2)  # a deadlock ends by it
        use()
        os._exit(0)
    found[name] = os.waitpid(child, 0)[1]
print(json.dumps(found), flush=True)
os._exit(0)
"""


def test_a_child_uses_what_a_thread_of_its_parent_had_locked(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PARENT, str(tmp_path)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    statuses = json.loads(done.stdout or "{}")
    assert len(statuses) == 9, done.stderr
    assert set(statuses.values()) == {0}, f"{signal.SIGALRM.value} is a deadlock: {statuses}\n{done.stderr}"
