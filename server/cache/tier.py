"""The one interface of the store's levels, and what a caller must tell apart: a miss, an outage, damage, a
lost write.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass

NAME_BYTES = 32  # A key or a content digest: BLAKE3, 32 raw bytes.


class Space(enum.Enum):
    """The two name spaces. The value is the letter that files and index rows carry."""

    MANIFEST = b"m"  # named by key; the bytes are a serialised SignedManifest
    CONTENT = b"c"  # named by BLAKE3 of the bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """What a tier keeps beside the bytes, so that choosing victims and listing need not read them."""

    cost_s: float = 0.0  # compile seconds that a loss would cost again
    content: bytes = b""  # MANIFEST only: the digest of the content that it names
    facts: bytes = (
        b""  # opaque to tiers (facts.py): what the catalogue must know without reading the manifest
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """The whole of a stored thing, as `get` returns it."""

    data: bytes
    meta: Meta
    tier: str = ""  # the tier that answered


@dataclass(frozen=True, slots=True)
class Stored:
    """One line of `iterate`."""

    name: bytes
    size_bytes: int
    meta: Meta


class TierError(Exception):
    """Base of what a tier can raise. `tier` names the level, `reason` is for people."""

    def __init__(self, tier: str, reason: str) -> None:
        super().__init__(f"{tier}: {reason}")
        self.tier = tier
        self.reason = reason


class TierUnavailableError(TierError):
    """The tier could not be asked. It is not a miss: count it apart and go on without the tier."""


class CorruptEntryError(TierError):
    """The entry was damaged. Treat it as a miss, after it was set aside (`VerifiedTier` does that)."""


class WriteLostError(TierError):
    """The tier works but did not keep this write: full, read-only, or the entry is larger than the tier."""


class Tier(ABC):
    """Holds entries by (space, name). Safe for concurrent use by threads, and where it is shared, by
    processes.

    Invariants (tests/server/cache/contract.py runs them against every tier):
    - `get` returns the whole entry or None; a lost or partly evicted entry is None, never another error.
    - An outage raises `TierUnavailableError`; damage raises `CorruptEntryError`; neither ever answers None.
    - Two writers of one name leave one whole entry.
    - Deleting the last manifest of a tier that names a content deletes that content there too.
    - Content is put before the manifest that names it.
    """

    name: str

    @abstractmethod
    def get(self, space: Space, name: bytes) -> Entry | None:
        """Return the entry, or None when this tier does not have it.

        Raises:
            TierUnavailableError: the tier could not be asked.
            CorruptEntryError: what is stored is not what was put.
        """

    @abstractmethod
    def put(self, space: Space, name: bytes, entry: Entry) -> None:
        """Keep the entry; it replaces one of the same name as a whole.

        Raises:
            WriteLostError: nothing was kept, and what was there before may be gone; the caller goes on.
            TierUnavailableError: the tier could not be asked; nothing was kept.
        """

    @abstractmethod
    def contains(self, space: Space, name: bytes) -> bool:
        """Tell whether `get` would likely find it.

        Cheap: damage is not looked for. Raises: TierUnavailableError.
        """

    @abstractmethod
    def delete(self, space: Space, name: bytes) -> bool:
        """Remove the entry; tell whether there was one.

        Raises: TierUnavailableError, WriteLostError (read-only).
        """

    @abstractmethod
    def iterate(self, space: Space) -> Iterator[Stored]:
        """Yield what is stored, in no order.

        Entries put or deleted meanwhile may or may not appear. Raises: TierUnavailableError.
        """

    @abstractmethod
    def naming(self, content: bytes) -> list[bytes]:
        """Return the keys of manifests here that name this content; none where the content is not there.

        An index answers, not a listing. Raises: TierUnavailableError.
        """

    def quarantine(self, space: Space, name: bytes) -> bool:
        """Set a bad entry aside so that it is not served again; a tier with nowhere to put it deletes it."""
        return self.delete(space, name)

    def touch(self, space: Space, names: Collection[bytes]) -> None:
        """Take note that these were used, for the choice of victims. A hint: never raises, may be dropped."""
        del space, names

    def health(self) -> str:
        """Return "" while the tier does all its work, else one sentence that says what does not work."""
        return ""

    def usage(self) -> Usage:
        """Return what the tier holds. Never raises: an unreachable tier holds nothing."""
        return Usage()

    def maintain(self) -> None:
        """Do slow house-keeping (find lost files, fold in uses), in a background thread; never raises."""
        return

    def close(self) -> None:
        """Let go of files and threads. Safe to call twice."""
        return


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Sizes and counters of a tier since it was opened."""

    entries: int = 0  # manifests
    size_bytes: int = 0  # manifests and contents
    limit_bytes: int = 0
    evictions: int = 0  # contents evicted to make room (each with the manifests that name it)
    quarantined: int = 0
    lost_writes: int = 0
    index_rebuilds: int = 0


class TierWrapper(Tier):
    """A tier that passes everything on to `base`. Wrappers override what they change and nothing else."""

    def __init__(self, base: Tier) -> None:
        self.base = base
        self.name = base.name

    def get(self, space: Space, name: bytes) -> Entry | None:
        return self.base.get(space, name)

    def put(self, space: Space, name: bytes, entry: Entry) -> None:
        self.base.put(space, name, entry)

    def contains(self, space: Space, name: bytes) -> bool:
        return self.base.contains(space, name)

    def delete(self, space: Space, name: bytes) -> bool:
        return self.base.delete(space, name)

    def iterate(self, space: Space) -> Iterator[Stored]:
        return self.base.iterate(space)

    def naming(self, content: bytes) -> list[bytes]:
        return self.base.naming(content)

    def quarantine(self, space: Space, name: bytes) -> bool:
        return self.base.quarantine(space, name)

    def touch(self, space: Space, names: Collection[bytes]) -> None:
        self.base.touch(space, names)

    def health(self) -> str:
        return self.base.health()

    def usage(self) -> Usage:
        return self.base.usage()

    def maintain(self) -> None:
        self.base.maintain()

    def close(self) -> None:
        self.base.close()
