"""What every tier promises (`Tier`), as tests. A class per tier in test_contract.py says how it is made."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from fuse_cache.server.cache.tier import CorruptEntryError, Entry, Meta, Space, Tier
from tests.server.cache.artifacts import artifact


class TierContract:
    """Subclasses define the fixture `tier`: empty, with room for 8 MiB at least."""

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        raise NotImplementedError

    def test_what_was_put_is_got_whole(self, tier: Tier) -> None:
        made = artifact(1)
        made.put_into(tier)
        manifest, content = tier.get(Space.MANIFEST, made.key), tier.get(Space.CONTENT, made.digest)
        assert manifest is not None
        assert content is not None
        assert (manifest.data, manifest.meta) == (made.signed_manifest, made.meta)
        assert content.data == made.content
        assert content.tier in tier.name
        assert tier.contains(Space.MANIFEST, made.key)
        assert tier.contains(Space.CONTENT, made.digest)

    @pytest.mark.parametrize("size_bytes", [0, 1, 3 * 1024 * 1024])
    def test_size_does_not_matter(self, tier: Tier, size_bytes: int) -> None:
        made = artifact(1, size_bytes=size_bytes)
        made.put_into(tier)
        found = tier.get(Space.CONTENT, made.digest)
        assert found is not None
        assert found.data == made.content

    def test_what_was_never_put_is_a_miss(self, tier: Tier) -> None:
        artifact(1).put_into(tier)
        other = artifact(2)
        assert tier.get(Space.MANIFEST, other.key) is None
        assert tier.get(Space.CONTENT, other.digest) is None
        assert not tier.contains(Space.MANIFEST, other.key)
        assert not tier.delete(Space.MANIFEST, other.key)
        assert not tier.quarantine(Space.MANIFEST, other.key)

    def test_the_spaces_are_apart(self, tier: Tier) -> None:
        made = artifact(1)
        made.put_into(tier)
        assert tier.get(Space.CONTENT, made.key) is None
        assert tier.get(Space.MANIFEST, made.digest) is None
        assert {stored.name for stored in tier.iterate(Space.CONTENT)} == {made.digest}

    def test_a_second_put_replaces_the_first(self, tier: Tier) -> None:
        first, second = artifact(1), artifact(2, size_bytes=50)
        first.put_into(tier)
        tier.put(Space.CONTENT, second.digest, second.content_entry)
        replacement = artifact(1, content=second.content)
        assert replacement.key == first.key
        tier.put(Space.MANIFEST, first.key, replacement.manifest_entry)
        found = tier.get(Space.MANIFEST, first.key)
        assert found is not None
        assert (found.data, found.meta.content) == (replacement.signed_manifest, second.digest)
        assert len(list(tier.iterate(Space.MANIFEST))) == 1

    def test_deleted_is_a_miss(self, tier: Tier) -> None:
        made = artifact(1)
        made.put_into(tier)
        assert tier.delete(Space.MANIFEST, made.key)
        assert tier.get(Space.MANIFEST, made.key) is None
        assert not tier.contains(Space.MANIFEST, made.key)
        assert not list(tier.iterate(Space.MANIFEST))

    def test_content_goes_with_the_last_manifest_that_names_it(self, tier: Tier) -> None:
        first, second = artifact(1), artifact(2, content=artifact(1).content)
        first.put_into(tier)
        second.put_into(tier)
        assert first.digest == second.digest
        assert len(list(tier.iterate(Space.CONTENT))) == 1
        tier.delete(Space.MANIFEST, first.key)
        assert tier.contains(Space.CONTENT, first.digest)
        tier.delete(Space.MANIFEST, second.key)
        assert not tier.contains(Space.CONTENT, first.digest)
        assert tier.get(Space.CONTENT, first.digest) is None

    def test_a_content_tells_who_names_it_while_it_is_there(self, tier: Tier) -> None:
        first, second = artifact(1), artifact(2, content=artifact(1).content)
        for one in (first, second, artifact(3)):
            one.put_into(tier)
        assert sorted(tier.naming(first.digest)) == sorted([first.key, second.key])
        tier.delete(Space.MANIFEST, first.key)
        assert tier.naming(first.digest) == [second.key]
        assert tier.naming(artifact(4).digest) == []
        tier.delete(Space.MANIFEST, second.key)
        assert tier.naming(first.digest) == []

    def test_a_lost_content_leaves_the_manifest_and_is_a_miss(self, tier: Tier) -> None:
        made = artifact(1)
        made.put_into(tier)
        tier.delete(Space.CONTENT, made.digest)
        assert tier.get(Space.CONTENT, made.digest) is None
        assert tier.get(Space.MANIFEST, made.key) is not None

    def test_what_is_set_aside_is_a_miss_and_can_be_put_again(self, tier: Tier) -> None:
        made = artifact(1)
        made.put_into(tier)
        assert tier.quarantine(Space.CONTENT, made.digest)
        assert tier.get(Space.CONTENT, made.digest) is None
        made.put_into(tier)
        found = tier.get(Space.CONTENT, made.digest)
        assert found is not None
        assert found.data == made.content

    def test_a_listing_names_everything_with_what_was_kept_beside_it(self, tier: Tier) -> None:
        made = [artifact(number, cost_s=number) for number in range(20)]
        for one in made:
            one.put_into(tier)
        assert {stored.name: stored.meta for stored in tier.iterate(Space.MANIFEST)} == {
            one.key: one.meta for one in made
        }
        assert tier.usage().entries == 20

    def test_a_listing_survives_deletions(self, tier: Tier) -> None:
        made = [artifact(number) for number in range(20)]
        for one in made:
            one.put_into(tier)
        seen = 0
        for stored in tier.iterate(Space.MANIFEST):
            tier.delete(Space.MANIFEST, stored.name)
            seen += 1
        assert seen == 20
        assert not list(tier.iterate(Space.MANIFEST))

    def test_a_reader_sees_nothing_or_one_writers_whole_entry(self, tier: Tier) -> None:
        """Four writers put manifests of one key: bytes and meta must be of the same put."""
        contents = [artifact(number, size_bytes=100) for number in range(4)]
        versions = [artifact(99, content=one.content) for one in contents]
        for one in contents:
            tier.put(Space.CONTENT, one.digest, one.content_entry)
        whole = {one.signed_manifest: one.meta for one in versions}
        failures: list[str] = []
        stop = threading.Event()

        def write(number: int) -> None:
            try:
                for _ in range(15):
                    tier.put(Space.MANIFEST, versions[number].key, versions[number].manifest_entry)
            except Exception as error:
                failures.append(repr(error))

        def read() -> None:
            while not stop.is_set():
                try:
                    found = tier.get(Space.MANIFEST, versions[0].key)
                except CorruptEntryError as error:
                    failures.append(repr(error))
                    return
                if found is not None and whole.get(found.data) != found.meta:
                    failures.append(f"mixed: {found.data[:20]!r}")

        reader = threading.Thread(target=read)
        writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for thread in (reader, *writers):
            thread.start()
        for thread in writers:
            thread.join()
        stop.set()
        reader.join()
        assert not failures
        assert [stored.name for stored in tier.iterate(Space.MANIFEST)] == [versions[0].key]
        found = tier.get(Space.MANIFEST, versions[0].key)
        assert found is not None
        assert whole[found.data] == found.meta

    def test_an_entry_without_anything_beside_it_is_fine(self, tier: Tier) -> None:
        made = artifact(1)
        tier.put(Space.CONTENT, made.digest, Entry(made.content, Meta()))
        found = tier.get(Space.CONTENT, made.digest)
        assert found is not None
        assert found.meta == Meta()

    def test_hints_and_house_keeping_change_nothing(self, tier: Tier) -> None:
        made = artifact(1)
        made.put_into(tier)
        tier.touch(Space.MANIFEST, [made.key, artifact(2).key])
        tier.maintain()
        found = tier.get(Space.MANIFEST, made.key)
        assert found is not None
        assert found.data == made.signed_manifest
        assert tier.health() == ""

    def test_it_closes_twice(self, tier: Tier) -> None:
        tier.close()
        tier.close()
