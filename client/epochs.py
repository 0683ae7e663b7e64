"""What a client last heard from a daemon: its epoch, targets and revocations. Kept on disk, for starts and
for outages.

A client tier answers only under the epoch that is current, so a new pass or toolchain on the daemon's side
makes every old entry a miss. The file is a hint, not a source of trust: whoever writes there can cause
misses, and cannot make an artifact load. Since it also says which builders were recalled, a file that
somebody else could have written is not read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from blake3 import blake3

from fuse_cache.client.files import read_whole, write_whole
from fuse_cache.client.options import CompileOptions
from fuse_cache.proto.compile_pb2 import ToolchainOffer
from fuse_cache.proto.toolchain import Toolchain

FRESH_S = 300.0  # Older knowledge is asked for again; it still serves while the daemon is away.
_MOST_BYTES = 4 << 20  # 100,000 recalled builders, 36 bytes each


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One daemon's word, and when it was given (wall clock: it outlives the process)."""

    epoch: str
    targets: tuple[str, ...] = ()
    revoked: tuple[str, ...] = ()
    revocations_version: int = 0
    heard_unix_s: float = 0.0


class Epochs:
    """Reads and keeps `Known` for one set of endpoints and one toolchain. Safe for concurrent use: files
    appear whole."""

    def __init__(
        self,
        folder: Path,
        options: CompileOptions,
        toolchain: Toolchain,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        identity = "\0".join(
            [*options.endpoint, options.namespace, str(toolchain), toolchain.torch_fingerprint.hex()]
        )
        self._path = folder / "epochs" / blake3(identity.encode()).hexdigest()[:32]
        self._now_s = now_s
        self._known: Known | None = None

    def last(self) -> Known | None:
        """Return what was heard last, however long ago, or None."""
        if self._known is None:
            try:
                found = json.loads(read_whole(self._path, _MOST_BYTES, others_may_write=False))
                self._known = Known(
                    epoch=str(found["epoch"]),
                    targets=tuple(map(str, found["targets"])),
                    revoked=tuple(map(str, found["revoked"])),
                    revocations_version=int(found["revocations_version"]),
                    heard_unix_s=float(found["heard_unix_s"]),
                )
            except (OSError, ValueError, KeyError, TypeError):
                return None
        return self._known

    def fresh(self) -> Known | None:
        """Return what was heard within FRESH_S, or None: the daemon is to be asked."""
        known = self.last()
        if known is None or not 0 <= self._now_s() - known.heard_unix_s < FRESH_S:
            return None
        return known

    def heard(self, known: Known) -> None:
        """Keep what a daemon said just now. A folder that cannot be written is no reason to stop."""
        previous = self._known
        self._known = Known(**{**asdict(known), "heard_unix_s": self._now_s()})
        if (
            previous is not None
            and _same(previous, self._known)
            and self._known.heard_unix_s - previous.heard_unix_s < 60
        ):
            return  # Every lookup hears it; one write a minute is enough.
        write_whole(self._path, json.dumps(asdict(self._known)).encode())


def epoch_for(host: Toolchain, offers: Sequence[ToolchainOffer], *, any_wheel: bool) -> str:
    """Return the epoch that lookups of this host will be answered from, as well as can be told before one is:
    the daemon chooses by target, and says with every answer what it chose."""

    def fitness(offer: ToolchainOffer) -> tuple[bool, bool]:
        theirs = Toolchain.from_message(offer.toolchain)
        return theirs == host, host.compatible_with(theirs, target="gpu", any_wheel=any_wheel) is None

    return max(offers, key=fitness).epoch if offers else ""


def _same(one: Known, other: Known) -> bool:
    return {**asdict(one), "heard_unix_s": 0} == {**asdict(other), "heard_unix_s": 0}
