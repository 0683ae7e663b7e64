"""The rows over the entry files: sizes, uses, and which manifests name a content. Nothing in them is needed
to read.

diskcache gives the table, its upkeep across threads and processes, and the write path (file first, then row).
Its own choices are switched off: no pickle, no eviction or culling, no reads of values through it, no
deletion of files.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from diskcache.core import MODE_BINARY

from fuse_cache.server.cache.database import Database, PendingFile
from fuse_cache.server.cache.entry_file import open_meta, seal_meta
from fuse_cache.server.cache.eviction import Candidate
from fuse_cache.server.cache.index_errors import translated
from fuse_cache.server.cache.tier import NAME_BYTES, Meta, Space, Stored

PAGE_ROWS = 1_000  # Rows per query of a listing: some milliseconds.


@dataclass(frozen=True, slots=True)
class Row:
    """What reconciliation compares with a file. `consistent`: the row does not contradict itself."""

    size_bytes: int
    consistent: bool


class Index:
    """The rows of one store folder.

    Safe for threads and processes. Every method raises the errors of index_errors.py.
    """

    def __init__(self, root: str, *, timeout_s: float = 2.0) -> None:
        self.database = Database(root, timeout_s=timeout_s)

    def put(self, space: Space, name: bytes, pending: PendingFile) -> None:
        """Let `pending` write its file, then write its row.

        An OSError of the file is passed on: then there is neither.
        """
        with translated():
            self.database.cache().set(row_key(space, name), pending, tag=_tag(pending.meta))

    def adopt(self, found: Collection[tuple[Space, Stored, float]]) -> None:
        """Write rows for files that are there already: (space, what, when the file was written)."""
        # diskcache's own `set` costs 0.3 ms a row: a minute for 100,000 entries.
        sql = (
            "INSERT INTO Cache (key, raw, store_time, access_time, tag, size, mode, value) "
            "VALUES (?, 1, ?, ?, ?, ?, ?, ?) ON CONFLICT (key, raw) DO UPDATE SET tag = excluded.tag, "
            "size = excluded.size, mode = excluded.mode, value = excluded.value, "
            "store_time = excluded.store_time"
        )
        with self.database.transaction() as execute:
            for space, stored, written_s in found:
                key, meta = row_key(space, stored.name), stored.meta
                row = (key, written_s, written_s, _tag(meta), stored.size_bytes, MODE_BINARY, seal_meta(meta))
                execute(sql, row)

    def delete(self, rows: Collection[tuple[Space, bytes]]) -> None:
        """Delete rows. Their files are the caller's to unlink, before."""
        with self.database.transaction() as execute:
            for space, name in rows:
                execute("DELETE FROM Cache WHERE key = ?", (row_key(space, name),))

    def touch(self, uses: dict[tuple[Space, bytes], tuple[float, int]]) -> None:
        """Fold in uses: row -> (time of the last one, how many)."""
        sql = "UPDATE Cache SET access_time = ?, access_count = access_count + ? WHERE key = ? AND raw = 1"
        with self.database.transaction() as execute:
            for (space, name), (used_unix_s, count) in uses.items():
                execute(sql, (used_unix_s, count, row_key(space, name)))

    def resize(self, sizes: dict[bytes, int]) -> None:
        """Set sizes right: row key -> bytes of the file."""
        with self.database.transaction() as execute:
            for key, size_bytes in sizes.items():
                execute("UPDATE Cache SET size = ? WHERE key = ? AND raw = 1", (size_bytes, key))

    def sweep(self) -> None:
        """Delete rows that cannot be ours, and count the total anew: the sum the triggers keep may be
        damaged.
        """
        strange = (
            "DELETE FROM Cache WHERE raw != 1 OR typeof(key) != 'blob' OR length(key) != ? "
            "OR substr(key, 1, 1) NOT IN (?, ?)"
        )
        with self.database.transaction() as execute:
            execute(strange, (1 + NAME_BYTES, Space.MANIFEST.value, Space.CONTENT.value))
        self.recount()

    def recount(self) -> None:
        """Set the total to the sum of the rows (50 ms for 100,000 entries)."""
        sql = "UPDATE Settings SET value = (SELECT COALESCE(SUM(size), 0) FROM Cache) WHERE key = 'size'"
        with self.database.transaction() as execute:
            execute(sql)

    def total_bytes(self) -> int:
        """Return the size of all indexed files. diskcache's triggers keep it, for all processes at once."""
        with translated():
            total_bytes = int(self.database.one("SELECT value FROM Settings WHERE key = 'size'"))
            if total_bytes < 0:  # Damage: the cap would hold nothing back.
                raise ValueError(f"a total of {total_bytes} bytes")
            return total_bytes

    def count(self, space: Space) -> int:
        sql = "SELECT COUNT(*) FROM Cache WHERE key >= ? AND key < ?"
        with translated():
            return int(self.database.one(sql, *_bounds(space)))

    def page(self, space: Space, after: bytes) -> list[Stored]:
        """Return the next rows of a listing, by name; empty at its end. No snapshot is held between pages."""
        _, high = _bounds(space)
        sql = (
            "SELECT key, size, value FROM Cache WHERE key > ? AND key < ? AND length(key) = 33 AND raw = 1 "
            "ORDER BY key LIMIT ?"
        )
        with translated():
            return [
                Stored(bytes(key)[1:], int(size_bytes), open_meta(bytes(value)))
                for key, size_bytes, value in self.database.all(sql, space.value + after, high, PAGE_ROWS)
            ]

    def shard(self, space: Space, shard: str) -> dict[bytes, Row]:
        """Return the rows of names that begin with these two hex digits."""
        first = bytes.fromhex(shard)
        low = space.value + first
        high = space.value + bytes([first[0] + 1]) if first[0] < 255 else _bounds(space)[1]
        sql = "SELECT key, size, tag, value FROM Cache WHERE key >= ? AND key < ? AND length(key) = 33"
        with translated():
            return {
                bytes(key)[1:]: Row(
                    int(size), _tag(open_meta(bytes(value))) == (None if tag is None else bytes(tag))
                )
                for key, size, tag, value in self.database.all(sql, low, high)
            }

    def naming(self, content: bytes) -> list[bytes]:
        """Return the keys of the manifests that name this content."""
        page = self.database.all("SELECT key FROM Cache WHERE tag = ?", row_key(Space.CONTENT, content))
        return [bytes(key)[1:] for (key,) in page]

    def has(self, space: Space, name: bytes) -> bool:
        return bool(self.database.all("SELECT 1 FROM Cache WHERE key = ? AND raw = 1", row_key(space, name)))

    def candidates(self, *, unnamed_before_s: float) -> list[Candidate]:
        """Return what could be evicted, by row key: each content (its manifests go with it), and manifests
        without content.

        A content that no manifest names may be half of a publish that is under way: it counts from
        `unnamed_before_s` on.
        """
        contents = (
            "SELECT c.key, c.size, c.value, c.access_time FROM Cache c WHERE c.key >= ? AND c.key < ? "
            "AND (c.store_time < ? OR EXISTS (SELECT 1 FROM Cache m WHERE m.tag = c.key))"
        )
        manifests = (
            "SELECT m.key, m.size, m.value, m.access_time FROM Cache m WHERE m.key >= ? AND m.key < ? "
            "AND NOT EXISTS (SELECT 1 FROM Cache c WHERE c.key = m.tag AND c.raw = 1)"
        )
        pages = self.database.all(contents, *_bounds(Space.CONTENT), unnamed_before_s)
        pages += self.database.all(manifests, *_bounds(Space.MANIFEST))
        with translated():
            return [
                Candidate(bytes(key), int(size_bytes), open_meta(bytes(value)).cost_s, float(used or 0.0))
                for key, size_bytes, value, used in pages
            ]

    def unnamed(self, *, before_s: float) -> list[bytes]:
        """Return contents written before then that no manifest names: a publish that never ended, or a
        quarantine.
        """
        sql = (
            "SELECT c.key FROM Cache c WHERE c.key >= ? AND c.key < ? AND c.store_time < ? "
            "AND NOT EXISTS (SELECT 1 FROM Cache m WHERE m.tag = c.key)"
        )
        return [bytes(key)[1:] for (key,) in self.database.all(sql, *_bounds(Space.CONTENT), before_s)]

    def dangling(self, *, before_s: float) -> list[bytes]:
        """Return manifests written before then whose content is not there: they can only mislead."""
        sql = (
            "SELECT m.key FROM Cache m WHERE m.key >= ? AND m.key < ? AND m.store_time < ? "
            "AND m.tag IS NOT NULL AND NOT EXISTS (SELECT 1 FROM Cache c WHERE c.key = m.tag AND c.raw = 1)"
        )
        return [bytes(key)[1:] for (key,) in self.database.all(sql, *_bounds(Space.MANIFEST), before_s)]

    def close(self) -> None:
        self.database.close()


def row_key(space: Space, name: bytes) -> bytes:
    return space.value + name


def parse_row_key(key: bytes) -> tuple[Space, bytes]:
    return Space(key[:1]), key[1:]


def _tag(meta: Meta) -> bytes | None:
    return row_key(Space.CONTENT, meta.content) if meta.content else None


def _bounds(space: Space) -> tuple[bytes, bytes]:
    return space.value, bytes([space.value[0] + 1])
