"""Budgets, clearing up and verifying, on real files."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from samkv_integrations.errors import InvalidOption
from samkv_integrations.store.chunk import ChunkCache
from samkv_integrations.store.disk import ChunkStore
from samkv_integrations.store.upkeep import gc, verify
from tests.contracts.store_contract import TINY, chunk_for, reason


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def put(store: ChunkStore, seed: int) -> ChunkCache:
    chunk = replace(
        chunk_for(store, seed, 40), text=f"This is the text of chunk number {seed:04d}."
    )
    store.put(chunk)
    return chunk


def file_of(store: ChunkStore, chunk: ChunkCache) -> Path:
    return store.file(chunk.key, TINY.digest)


def size_on_disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors*"))


def size_of_one(tmp_path: Path) -> int:
    store = ChunkStore(tmp_path / "measured", namespace="a")
    return file_of(store, put(store, 1)).stat().st_size


def temporary_files(folder: Path) -> list[Path]:
    return list(folder.rglob("*.tmp*"))


class TestBudget:
    def test_it_holds_while_chunks_are_put(self, tmp_path: Path, folder: Path) -> None:
        limit = 3 * size_of_one(tmp_path) + 10
        store = ChunkStore(folder, namespace="a", max_bytes=limit)
        chunks = []
        for seed in range(9):
            chunks.append(put(store, seed))
            assert size_on_disk(folder) <= limit
        assert store.keys() == sorted(chunk.key for chunk in chunks[-3:])
        assert not any(store.contains(chunk.key, TINY) for chunk in chunks[:-3])
        assert [store.is_evicted(chunk.key, TINY) for chunk in chunks] == [True] * 6 + [False] * 3
        assert all(store.text(chunk.key) == chunk.text for chunk in chunks)
        assert reason(lambda: store.open(chunks[0].key, TINY)) == "absent"
        (row,) = store.stats().rows
        assert (row.chunks, row.evicted, store.stats().max_bytes) == (3, 6, limit)
        assert store.known_keys(TINY) == sorted(chunk.key for chunk in chunks)
        store.put(chunks[0])
        assert not store.is_evicted(chunks[0].key, TINY)

    def test_a_cache_that_goes_while_it_is_read_is_read_to_its_end(
        self, tmp_path: Path, folder: Path
    ) -> None:
        store = ChunkStore(folder, namespace="a", max_bytes=size_of_one(tmp_path))
        one = put(store, 1)
        with store.open(one.key, TINY) as opened:
            put(ChunkStore(folder, namespace="a"), 2)
            assert not store.contains(one.key, TINY)
            opened.verify()

    @pytest.mark.parametrize("quota", [False, True])
    def test_writers_share_the_room_for_one(
        self, tmp_path: Path, folder: Path, quota: bool
    ) -> None:
        one = size_of_one(tmp_path)
        store = ChunkStore(folder, namespace="a")
        store.set_budget(**({"quota": {"a": one}} if quota else {"max_bytes": one}))
        with ThreadPoolExecutor(4) as threads:
            assert len(list(threads.map(lambda seed: put(store, seed), range(12)))) == 12
        assert len(store.keys()) == 1 and size_on_disk(folder) == one

    def test_a_smaller_budget_holds_at_once(self, tmp_path: Path, folder: Path) -> None:
        store, one = ChunkStore(folder, namespace="a"), size_of_one(tmp_path)
        for seed in range(5):
            put(store, seed)
        store.set_budget(2 * one)
        assert len(store.keys()) == 2 and size_on_disk(folder) == 2 * one
        store.set_budget(None)
        for seed in range(5):
            put(store, seed)
        assert len(store.keys()) == 5

    def test_a_quota_does_not_touch_others(self, tmp_path: Path, folder: Path) -> None:
        one, other = (ChunkStore(folder, namespace=name) for name in "ab")
        one.set_budget(quota={"a": 2 * size_of_one(tmp_path)})
        for seed in range(4):
            put(one, seed)
            put(other, seed)
        assert (len(one.keys()), len(other.keys())) == (2, 4)
        ChunkStore(folder, quota={"b": 3 * size_of_one(tmp_path)})
        assert (len(one.keys()), len(other.keys())) == (2, 3)

    def test_files_that_vanish_are_tolerated(self, tmp_path: Path, folder: Path) -> None:
        store = ChunkStore(folder, namespace="a", max_bytes=2 * size_of_one(tmp_path))
        for seed in range(2):
            file_of(store, put(store, seed)).unlink()
        for seed in range(2, 4):
            put(store, seed)
        assert len(store.keys()) == 2

    @pytest.mark.parametrize("value", [0, -1, 1.5, "1GX", True, 2**63])
    def test_what_is_no_number_of_bytes_is_refused(self, folder: Path, value: object) -> None:
        with pytest.raises(InvalidOption, match="max_bytes=.*a number of bytes"):
            ChunkStore(folder, max_bytes=value)  # type: ignore[arg-type]
        with pytest.raises(InvalidOption, match="a=.*a number of bytes"):
            ChunkStore(folder, quota={"a": value})  # type: ignore[dict-item]

    def test_a_size_may_have_a_unit(self, folder: Path) -> None:
        store = ChunkStore(folder, max_bytes="20GB", quota={"a": "1.5 MiB"})
        assert store.index.budget() == (20 * 10**9, {"a": 3 * 2**19})

    def test_what_is_not_given_stays_as_it_is(self, folder: Path) -> None:
        """A quota alone took the budget of all namespaces away."""
        ChunkStore(folder, max_bytes=5000, quota={"a": 1000})
        assert ChunkStore(folder, quota={"b": 2000}).index.budget() == (
            5000,
            {"a": 1000, "b": 2000},
        )
        assert ChunkStore(folder, max_bytes=7000).index.budget()[1] == {"a": 1000, "b": 2000}


class TestGc:
    def test_a_store_in_order_is_left_alone(self, folder: Path) -> None:
        store = ChunkStore(folder)
        chunks = [put(store, seed) for seed in range(3)]
        done = gc(store)
        assert (done.n_forgotten, done.bytes_freed) == (0, 0)
        assert store.keys() == sorted(chunk.key for chunk in chunks)
        for chunk in chunks:
            with store.open(chunk.key, TINY) as stored:
                stored.verify()

    def test_files_of_living_writers_stay(self, folder: Path) -> None:
        store = ChunkStore(folder)
        file = file_of(store, put(store, 1))
        written = file.with_name(f"{file.name}.{'0' * 16}.tmp")
        written.write_bytes(b"half")
        gc(store)
        assert written.exists()

    def test_texts_of_lost_caches_go(self, folder: Path) -> None:
        store = ChunkStore(folder)
        file_of(store, lost := put(store, 1)).unlink()
        assert gc(store).n_forgotten == 1
        assert store.text(lost.key) is None

    def test_texts_of_evicted_caches_stay(self, tmp_path: Path, folder: Path) -> None:
        """Who evicts may be killed before it has said so: what is missing may have been evicted."""
        store = ChunkStore(folder, namespace="a", max_bytes=2 * size_of_one(tmp_path))
        chunks = [put(store, seed) for seed in range(3)]
        file_of(store, chunks[1]).unlink()
        assert gc(store).n_forgotten == 0
        for chunk in chunks[:2]:
            assert store.text(chunk.key) == chunk.text and store.is_evicted(chunk.key, TINY)

    def test_chunk_files_that_the_index_does_not_know_are_adopted(self, folder: Path) -> None:
        store, tenant = ChunkStore(folder), ChunkStore(folder, namespace="tenant")
        mine, theirs = put(store, 1), put(tenant, 1)
        kept = [
            (file_of(store, chunk), file_of(store, chunk).read_bytes()) for chunk in (mine, theirs)
        ]
        for one, chunk in ((store, mine), (tenant, theirs)):
            one.delete(chunk.key)
        for file, data in kept:
            file.write_bytes(data)
        assert store.keys() == []
        assert gc(store).recovered.n_adopted == 2
        assert store.keys() == [mine.key] and tenant.keys() == [theirs.key]
        assert tenant.text(theirs.key) == theirs.text

    def test_a_file_that_its_writer_indexes_meanwhile_stays(
        self, folder: Path, tmp_path: Path
    ) -> None:
        """It counts once in a budget that has no room for another."""
        store = ChunkStore(folder, namespace="a", max_bytes=2 * size_of_one(tmp_path))
        chunks = [put(store, seed) for seed in (1, 2)]
        for chunk in chunks:
            store.index.adopt(store.files.entry(file_of(store, chunk)))
        assert store.keys() == sorted(chunk.key for chunk in chunks)
        assert all(file_of(store, chunk).exists() for chunk in chunks)

    def test_garbage_goes(self, folder: Path) -> None:
        store = ChunkStore(folder)
        place = file_of(store, put(store, 1)).parent
        (place / f"{place.name}{'0' * 30}.safetensors").write_bytes(b"garbage")
        for name, age_s in (("secret.x.tmp", 3700), ("secret.y.tmp", 60)):
            (folder / name).write_bytes(b"half")
            os.utime(folder / name, (time.time() - age_s,) * 2)
        done = gc(store)
        assert (done.recovered.n_damaged, done.recovered.n_unfinished) == (1, 1)
        assert len(list(place.iterdir())) == 1
        assert [file.name for file in temporary_files(folder)] == ["secret.y.tmp"]


class TestVerify:
    def test_says_what_is_damaged_and_repairs_only_if_asked(self, folder: Path) -> None:
        store = ChunkStore(folder)
        sound, bad = put(store, 1), put(store, 2)
        file = file_of(store, bad)
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        found = verify(store, progress=True)
        assert [(one.key, one.reason) for one in found.damaged] == [(bad.key, "corrupt")]
        assert (found.n_chunks, found.n_repaired) == (2, 0) and file.exists()
        assert verify(store, repair=True).n_repaired == 1
        assert not file.exists() and store.keys() == [sound.key]
        assert store.text(bad.key) == bad.text, "in a prompt it is a miss, and computed again"
        assert verify(store).damaged == ()
        store.put(bad)
        assert verify(store).n_chunks == 2

    def test_looks_at_every_namespace(self, folder: Path) -> None:
        tenant = ChunkStore(folder, namespace="tenant")
        file_of(tenant, put(tenant, 1)).write_bytes(b"")
        (damage,) = verify(ChunkStore(folder)).damaged
        assert damage.reason == "corrupt"


def test_tenants_see_nothing_of_each_other(folder: Path) -> None:
    one, other = (ChunkStore(folder, namespace=name) for name in ("one", "other"))
    chunk = put(one, 1)
    other.put(replace(chunk_for(other, 2), text="Mine."))
    (mine,) = other.keys()
    assert other.text(chunk.key) is None and other.delete(chunk.key) == 0
    assert one.contains(chunk.key, TINY)
    hashes = one.chunk_index(TINY).windows.first_places(chunk.token_ids)
    assert one.chunk_index(TINY).find(hashes)[0]
    assert other.chunk_index(TINY).find(hashes) == ({}, {})
    assert other.stats().n_chunks == 1 and {r.namespace for r in other.stats().rows} == {"other"}
    assert other.stats(everyone=True).n_chunks == 2
    other.delete(mine)
    assert other.fingerprints() == [] and one.fingerprints() == [TINY]
