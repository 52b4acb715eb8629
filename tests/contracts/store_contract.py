"""What every `IndexedStore` must do. A test module makes a subclass for each kind of store."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from samkv_integrations.errors import CacheMiss, FingerprintMismatch, InvalidOption
from samkv_integrations.prompt.layout import find_runs
from samkv_integrations.runtimes.transformers.entries.cache_arrays import (
    cache_shape,
    entry_format_of,
)
from samkv_integrations.store.base import StoredChunk
from samkv_integrations.store.chunk import CacheArray, ChunkCache, Fingerprint
from samkv_integrations.store.chunk_file import FileLayout
from samkv_integrations.store.indexed import FingerprintStats, IndexedStore, require
from tests.support.chunks import TINY, random_chunk

# One token, shorter than a block, exactly the anchors, one more, many with a short last block.
SIZES = (1, 3, 12, 13, 50)


def chunk_for(
    store: IndexedStore, seed: int, n_tokens: int = 30, fingerprint: Fingerprint = TINY
) -> ChunkCache:
    """A random chunk under the key that ``store`` gives it."""
    chunk = random_chunk(seed, n_tokens, fingerprint)
    return replace(chunk, key=store.key(fingerprint, chunk.token_ids.tolist()))


def read(stored: StoredChunk, layer: int, blocks: list[int]) -> NDArray[np.uint8]:
    """Entries (S, E) of the blocks, in the middle of an array full of canaries."""
    spans = [stored.blocks.span(block) for block in blocks]
    n_rows = sum(stop - first for first, stop in spans)
    entries = np.full((n_rows + 2, entry_bytes(stored.fingerprint)), 77, np.uint8)
    stored.read_blocks(layer, blocks, entries[1:-1])
    assert (entries[0] == 77).all() and (entries[-1] == 77).all()
    return entries[1:-1]


def read_all(stored: StoredChunk) -> NDArray[np.uint8]:
    """All entries (L, T, E), as a part of a larger array full of canaries."""
    made_by, n_tokens = stored.fingerprint, stored.n_tokens
    whole = np.full((made_by.n_layers, n_tokens + 5, entry_bytes(made_by)), 77, np.uint8)
    stored.read_layers(0, list(whole[:, 2 : 2 + n_tokens]))
    assert (whole[:, :2] == 77).all() and (whole[:, 2 + n_tokens :] == 77).all()
    return whole[:, 2 : 2 + n_tokens]


def entry_bytes(fingerprint: Fingerprint) -> int:
    return entry_format_of(fingerprint).n_bytes


def assert_same(found: Mapping[str, CacheArray], expected: Mapping[str, CacheArray]) -> None:
    """Arrays of the same names, dtypes, shapes and bytes."""
    assert list(found) == list(expected)
    for name, array in found.items():
        assert array.kind == expected[name].kind, name
        assert array.data.tobytes() == expected[name].data.tobytes(), name


def arrays_of(stored: StoredChunk, chunk: ChunkCache) -> dict[str, CacheArray]:
    """The arrays that a store gives, by the names of those in ``chunk``."""
    return {name: stored.array(name) for name in (*chunk.at_opening, *chunk.on_demand)}


def reason(read: Callable[[], object]) -> str:
    with pytest.raises(CacheMiss) as caught:
        read()
    return caught.value.reason


class StoreContract:
    """Subclasses override the fixture ``make``: a function namespace -> a new, empty store.

    has_files: whether caches are read from files.
    """

    has_files = True

    @pytest.fixture
    def make(self) -> Callable[..., IndexedStore]:
        raise NotImplementedError

    @pytest.fixture
    def store(self, make: Callable[..., IndexedStore]) -> IndexedStore:
        return make()

    @pytest.mark.parametrize("bits", [4, 8, 16])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("n_tokens", SIZES)
    def test_gives_back_what_was_put(
        self, store: IndexedStore, n_tokens: int, dtype: str, bits: int
    ) -> None:
        chunk = chunk_for(store, 1, n_tokens, replace(TINY, dtype=dtype, store_bits=bits))
        store.put(chunk)
        with store.open(chunk.key, chunk.fingerprint, chunk.token_ids.tolist()) as stored:
            assert (stored.key, stored.fingerprint) == (chunk.key, chunk.fingerprint)
            assert (stored.n_tokens, stored.blocks) == (n_tokens, chunk.blocks)
            assert stored.token_ids.dtype == np.int32
            assert np.array_equal(stored.token_ids, chunk.token_ids)
            assert_same(arrays_of(stored, chunk), {**chunk.at_opening, **chunk.on_demand})
            assert chunk.shape == cache_shape(chunk.fingerprint, n_tokens)
            for layer in range(TINY.n_layers):
                found = read(stored, layer, list(range(chunk.blocks.n_blocks)))
                assert np.array_equal(found, chunk.entries[layer])
            assert np.array_equal(read_all(stored), chunk.entries)
            stored.verify()

    def test_reads_blocks_in_the_order_given(self, store: IndexedStore) -> None:
        chunk = chunk_for(store, 2, 30)
        store.put(chunk)
        with store.open(chunk.key, TINY) as stored:
            for blocks in ([0], [2], [7], [0, 6, 7], [1, 2, 5], [5, 1], []):
                tokens = [token for b in blocks for token in range(*chunk.blocks.span(b))]
                assert np.array_equal(read(stored, 1, blocks), chunk.entries[1, tokens])

    def test_prefetch_changes_nothing(self, store: IndexedStore) -> None:
        chunk = chunk_for(store, 2, 30)
        store.begin_to_fetch([chunk.key], TINY)  # absent
        assert store.keys() == []
        store.put(chunk)
        store.begin_to_fetch([chunk.key], TINY)
        with store.open(chunk.key, TINY) as stored:
            stored.verify()

    def test_layers_are_read_by_themselves(self, store: IndexedStore) -> None:
        chunk = chunk_for(store, 2, 30)
        store.put(chunk)
        with store.open(chunk.key, TINY) as stored:
            for first in range(TINY.n_layers):
                for last in range(first + 1, TINY.n_layers + 1):
                    entries = np.empty_like(chunk.entries[first:last])
                    before = stored.bytes_read
                    stored.read_layers(first, list(entries))
                    assert np.array_equal(entries, chunk.entries[first:last])
                    assert stored.bytes_read - before == entries.nbytes

    def test_counts_the_bytes_of_entries_every_time_and_of_parts_once(
        self, store: IndexedStore
    ) -> None:
        if not self.has_files:
            pytest.skip("parts are not read")
        chunk = chunk_for(store, 3, 30)
        store.put(chunk)
        with store.open(chunk.key, TINY) as stored:
            for _ in range(2):
                before = stored.bytes_read
                read(stored, 0, [0, 3, 7])
                assert stored.bytes_read - before == (4 + 4 + 2) * entry_bytes(TINY)
            for name, array in chunk.on_demand.items():
                before = stored.bytes_read
                stored.array(name)
                stored.array(name)
                assert stored.bytes_read - before == array.kind.n_bytes
            before = stored.bytes_read
            read_all(stored)
            assert stored.bytes_read - before == chunk.entries.nbytes
        with store.open(chunk.key, TINY) as stored:
            before = stored.bytes_read
            read_all(stored)
            for name in chunk.at_opening:
                stored.array(name)
            assert stored.bytes_read - before == chunk.entries.nbytes

    def test_misses_say_why(self, store: IndexedStore) -> None:
        chunk = chunk_for(store, 4)
        ids = chunk.token_ids.tolist()
        assert reason(lambda: store.open(chunk.key, TINY)) == "absent"
        store.put(chunk)
        store.open(chunk.key, TINY, tuple(ids)).close()
        other = replace(TINY, weights="w1")
        assert reason(lambda: store.open(chunk.key, other)) == "absent"
        for unlike in (replace(TINY, store_bits=8), replace(TINY, block_size=8)):
            key = store.key(unlike, ids)
            missed = reason(lambda key=key, unlike=unlike: store.open(key, unlike, ids))
            assert missed == "absent", "the same text, cached in another way"
        for wrong in ([], ids[:-1], [*ids, 0], [ids[0] + 1, *ids[1:]]):
            assert reason(lambda wrong=wrong: store.open(chunk.key, TINY, wrong)) == "tokens"

    @pytest.mark.parametrize(
        "key", ["", ".", "..", "../../etc/passwd", "a" * 31, "a" * 33, "A" * 32, "é" * 32, "a\0b"]
    )
    def test_a_key_that_is_none_names_nothing(self, store: IndexedStore, key: str) -> None:
        store.put(chunk_for(store, 4))
        assert reason(lambda: store.open(key, TINY)) == "absent"
        assert not store.contains(key, TINY)
        assert store.text(key) is None
        assert not store.delete(key)
        assert len(store.keys()) == 1

    def test_label_of_the_model_does_not_matter(self, store: IndexedStore) -> None:
        chunk = chunk_for(store, 5)
        store.put(chunk)
        relabelled = replace(TINY, model="another/path")
        assert store.key(relabelled, chunk.token_ids.tolist()) == chunk.key
        assert store.contains(chunk.key, relabelled)
        with store.open(chunk.key, relabelled) as stored:
            assert stored.fingerprint == relabelled
            stored.verify()

    def test_put_twice_is_put_once_and_the_last_counts(self, store: IndexedStore) -> None:
        chunk = chunk_for(store, 6)
        store.put(chunk)
        stats = store.stats()
        store.put(chunk)
        assert store.stats() == stats
        another = chunk.text[::-1]  # of as many bytes
        store.put(replace(chunk, entries=chunk.entries ^ 1, text=another))
        assert store.stats() == stats
        assert store.text(chunk.key) == another
        with store.open(chunk.key, TINY) as stored:
            assert np.array_equal(read(stored, 0, [0]), chunk.entries[0, :4] ^ 1)

    def test_an_open_chunk_outlives_its_place_in_the_store(self, store: IndexedStore) -> None:
        chunk = chunk_for(store, 7)
        store.put(chunk)
        with store.open(chunk.key, TINY) as replaced:
            store.put(replace(chunk, entries=chunk.entries ^ 1))
            assert np.array_equal(read(replaced, 1, [3]), chunk.entries[1, 12:16])
        store.put(chunk)
        with store.open(chunk.key, TINY) as deleted:
            assert store.delete(chunk.key)
            deleted.verify()
            assert np.array_equal(read(deleted, 1, [3]), chunk.entries[1, 12:16])

    def test_a_chunk_that_was_let_go_is_read_all_the_same(self, store: IndexedStore) -> None:
        chunk = chunk_for(store, 7)
        store.put(chunk)
        with store.open(chunk.key, TINY) as stored:
            for _ in range(2):
                stored.let_go()
            assert np.array_equal(read_all(stored), chunk.entries)
            store.touch(chunk.key, TINY)
            stored.verify()
            assert_same(arrays_of(stored, chunk), {**chunk.at_opening, **chunk.on_demand})

    def test_a_closed_chunk_is_not_read(self, store: IndexedStore) -> None:
        if not self.has_files:
            pytest.skip("there is no file to close")
        chunk = chunk_for(store, 8)
        store.put(chunk)
        stored = store.open(chunk.key, TINY)
        stored.close()
        stored.close()
        uses = (
            stored.verify,
            stored.text,
            stored.chunk,
            lambda: stored.array("key_range"),
            lambda: read(stored, 0, [0]),
            lambda: read_all(stored),
        )
        for use in uses:
            with pytest.raises(AssertionError, match="closed"):
                use()

    @pytest.mark.parametrize(
        "text", ["", "e\u0301 and \u00e9, \U0001f40b, \ud800 alone"], ids=ascii
    )
    def test_an_open_chunk_hands_out_its_text_and_all_of_it(
        self, store: IndexedStore, text: str
    ) -> None:
        for seed, n_tokens in enumerate(SIZES):
            put = replace(chunk_for(store, seed, n_tokens), text=text)
            store.put(put)
            with store.open(put.key, replace(TINY, model="another label")) as stored:
                assert stored.text() == stored.text() == text
                whole = stored.chunk()
            assert (whole.key, whole.fingerprint, whole.text) == (put.key, TINY, text)
            assert_same(whole.at_opening, put.at_opening)
            assert_same(whole.on_demand, put.on_demand)
            for found, expected in (
                (whole.token_ids, put.token_ids),
                (whole.entries, put.entries),
            ):
                assert found.dtype == expected.dtype and np.array_equal(found, expected)

    def test_keys_contains_delete(self, store: IndexedStore) -> None:
        other = replace(TINY, block_size=8)
        here = [chunk_for(store, seed) for seed in range(5)]
        there = [chunk_for(store, seed, fingerprint=other) for seed in range(3)]
        assert store.keys() == store.keys(TINY) == []
        for chunk in here + there:
            store.put(chunk)
        assert store.keys(TINY) == sorted(chunk.key for chunk in here)
        assert store.keys(other) == sorted(chunk.key for chunk in there)
        assert store.keys() == sorted(chunk.key for chunk in here + there)
        gone = here[2].key
        assert store.contains(gone, TINY) and not store.contains(gone, other)
        assert store.delete(gone) and not store.delete(gone)
        assert not store.contains(gone, TINY)
        assert reason(lambda: store.open(gone, TINY)) == "absent"
        assert store.text(gone) is None
        assert gone not in store.keys() and len(store.keys()) == 7

    def test_a_damaged_chunk_is_put_away_and_its_text_stays(self, store: IndexedStore) -> None:
        chunk, other = chunk_for(store, 1), replace(TINY, block_size=8)
        store.quarantine(chunk.key, TINY)  # it is not there
        store.put(chunk)
        store.quarantine(chunk.key, other)
        assert store.contains(chunk.key, TINY)
        store.quarantine(chunk.key, TINY)
        assert not store.contains(chunk.key, TINY) and store.keys() == []
        assert reason(lambda: store.open(chunk.key, TINY)) == "absent"
        assert store.text(chunk.key) == chunk.text
        assert not store.is_evicted(chunk.key, TINY)  # damage is no want of room
        store.put(chunk)
        with store.open(chunk.key, TINY) as stored:
            stored.verify()

    def test_what_prompts_held_is_recorded_whatever_it_is(self, store: IndexedStore) -> None:
        chunk = chunk_for(store, 1)
        store.put(chunk)
        store.record(TINY)
        store.record(TINY, used=[chunk.key, chunk.key], missed=["0" * 32])
        store.record(replace(TINY, block_size=8), missed=[chunk.key])
        assert store.keys() == [chunk.key] and not store.is_evicted("0" * 32, TINY)

    def test_a_chunk_ages_from_when_it_was_put_or_touched(
        self, store: IndexedStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        chunk, other = chunk_for(store, 1), replace(TINY, block_size=8)
        store.touch(chunk.key, TINY)
        assert store.age_s(chunk.key, TINY) is None and not store.contains(chunk.key, TINY)
        store.put(chunk)
        began = time.time()

        def age_after(seconds: float) -> float:
            monkeypatch.setattr(time, "time", lambda: began + seconds)
            age = store.age_s(chunk.key, TINY)
            assert age is not None
            return age

        assert age_after(0) < 10
        assert age_after(100) == pytest.approx(100, abs=10)
        store.touch(chunk.key, other)
        assert age_after(100) == pytest.approx(100, abs=10)
        store.touch(chunk.key, TINY)
        assert age_after(100) < 1
        assert age_after(130) == pytest.approx(30, abs=1)
        assert age_after(50) == 0  # the clock was set back
        assert store.age_s(chunk.key, other) is store.age_s("../x", TINY) is None
        with store.open(chunk.key, TINY) as stored:
            stored.verify()
        store.delete(chunk.key)
        assert store.age_s(chunk.key, TINY) is None

    @pytest.mark.parametrize("key", [5, None, "\ud800"])
    def test_what_is_no_key_is_not_deleted(self, store: IndexedStore, key: object) -> None:
        with pytest.raises(InvalidOption, match="key=.*; it must be a string"):
            store.delete(key)  # type: ignore[arg-type]

    def test_delete_removes_a_key_under_all_fingerprints(self, store: IndexedStore) -> None:
        other = replace(TINY, block_size=8)
        chunk = chunk_for(store, 1)
        store.put(chunk)
        store.put(random_chunk(1, 30, other, key=chunk.key))
        assert store.keys() == [chunk.key]
        assert store.delete(chunk.key)
        assert store.keys() == store.keys(TINY) == store.keys(other) == []

    @pytest.mark.parametrize(
        "text", ["", "plain", "é ∑ 中文 🙂", "a\r\nb\nc\r", "\ud800 lone", "\0"]
    )
    def test_text_comes_back_as_it_was(self, store: IndexedStore, text: str) -> None:
        chunk = replace(chunk_for(store, 9), text=text)
        store.put(chunk)
        assert store.text(chunk.key) == text
        assert store.text(store.key(TINY, [1])) is None

    def test_keys_depend_on_everything(self, make: Callable[..., IndexedStore]) -> None:
        store, ids = make(), [1, 2, 3]
        key = store.key(TINY, ids)
        assert store.key(TINY, tuple(ids)) == key
        assert len(key) == 32 and set(key) <= set("0123456789abcdef")
        others = {
            store.key(TINY, [1, 2]),
            store.key(TINY, [1, 2, 4]),
            store.key(replace(TINY, weights="w1"), ids),
            make().key(TINY, ids),  # another secret
            make(namespace="tenant").key(TINY, ids),
        }
        assert len(others | {key}) == 6

    def test_says_its_namespace(self, make: Callable[..., IndexedStore]) -> None:
        assert (make().namespace, make(namespace="tenant").namespace) == ("", "tenant")

    def test_knows_the_chunks_that_it_has_a_text_of(self, store: IndexedStore) -> None:
        chunks = [chunk_for(store, seed) for seed in range(3)]
        store.put(chunk_for(store, 1, fingerprint=replace(TINY, block_size=8)))
        assert store.known_keys(TINY) == []
        for chunk in chunks:
            store.put(chunk)
        assert store.known_keys(TINY) == store.keys(TINY) == sorted(c.key for c in chunks)
        store.delete(chunks[0].key)
        assert store.known_keys(TINY) == store.keys(TINY)

    def test_knows_the_texts_of_all_models(self, store: IndexedStore) -> None:
        assert store.known_keys() == []
        made_by = [TINY, replace(TINY, block_size=8), replace(TINY, weights="w1")]
        texts = ["The first text of all three.", " The first text of all three.\n", "Another one."]
        chunks = [
            replace(chunk_for(store, seed, fingerprint=each), text=text)
            for seed, (each, text) in enumerate(zip(made_by, texts, strict=True))
        ]
        for chunk in chunks:
            store.put(chunk)
        first, second, third = (chunk.key for chunk in chunks)
        assert store.known_keys() == store.keys() == sorted([first, second, third])
        assert store.same_texts(first) == store.same_texts(second) == {first, second}
        assert store.same_texts(third, "f" * 32) == {third, "f" * 32}
        assert store.same_texts() == set()

    def test_texts_of_other_namespaces_are_not_the_same(
        self, make: Callable[..., IndexedStore]
    ) -> None:
        mine, theirs = make(), make(namespace="tenant")
        for store in (mine, theirs):
            store.put(chunk_for(store, 1))
        assert mine.same_texts(*mine.keys()) == set(mine.keys())

    def test_chunks_are_found_by_their_token_ids(self, make: Callable[..., IndexedStore]) -> None:
        mine, theirs = make(), make(namespace="tenant")
        chunks = [chunk_for(mine, seed, 40) for seed in range(3)]
        for chunk in chunks:
            mine.put(chunk)
        theirs.put(chunk_for(theirs, 7, 40))
        ids = [token for chunk in chunks for token in chunk.token_ids.tolist()]

        def found(store: IndexedStore, fingerprint: Fingerprint = TINY) -> list[str]:
            return [each.key for each in find_runs(ids, [store.chunk_index(fingerprint)])]

        assert found(mine) == [chunk.key for chunk in chunks]
        assert found(theirs) == found(mine, replace(TINY, block_size=8)) == []
        mine.quarantine(chunks[0].key, TINY)  # a cache that is lost is missed, not unknown
        assert found(mine) == [chunk.key for chunk in chunks]
        mine.delete(chunks[0].key)
        assert found(mine) == [chunk.key for chunk in chunks[1:]]
        assert mine.forget({chunks[1].text.strip()}.__contains__) == 1
        assert found(mine) == [chunks[2].key]
        mine.put(chunks[0])
        assert found(mine) == [chunks[0].key, chunks[2].key]

    @pytest.mark.parametrize("namespace", [None, 3, "x" * 1001, "\ud800"])
    def test_refuses_a_namespace_that_is_no_name(
        self, make: Callable[..., IndexedStore], namespace: object
    ) -> None:
        with pytest.raises(InvalidOption, match="namespace="):
            make(namespace=namespace)

    def test_forgets_a_text_under_all_fingerprints(self, store: IndexedStore) -> None:
        other = replace(TINY, block_size=8, store_bits=16)
        kept = chunk_for(store, 2)
        for fingerprint in (TINY, other):
            store.put(replace(chunk_for(store, 1, fingerprint=fingerprint), text=" Secret.\n"))
        store.put(kept)
        (secret,) = set(store.keys(TINY)) - {kept.key}
        assert store.forget({"Secret."}.__contains__) == 2
        assert store.keys() == [kept.key] and store.text(secret) is None
        assert store.text(kept.key) == kept.text
        assert store.forget({"Secret."}.__contains__) == 0

    def test_forgets_by_token_ids_whatever_the_text(self, store: IndexedStore) -> None:
        chunk, kept = chunk_for(store, 1), chunk_for(store, 2)
        for each in (chunk, kept):
            store.put(each)
        assert store.forget(lambda body: False, [chunk.token_ids.tolist(), [1, 2]]) == 1
        assert store.keys() == [kept.key] and store.text(chunk.key) is None

    def test_the_first_note_stays_if_it_shall(self, store: IndexedStore) -> None:
        assert store.note("owner") is None
        assert store.put_note("owner", "one", replace=False)
        assert not store.put_note("owner", "two", replace=False)
        assert store.note("owner") == "one"
        assert store.put_note("owner", "three") and store.note("owner") == "three"

    def test_fingerprints_are_those_with_chunks(self, store: IndexedStore) -> None:
        other = replace(TINY, block_size=8)
        assert store.fingerprints() == []
        chunks = [chunk_for(store, 1), chunk_for(store, 1, fingerprint=other)]
        for chunk in chunks:
            store.put(chunk)
        assert store.fingerprints() == sorted([TINY, other], key=lambda f: f.digest)
        store.delete(chunks[0].key)
        assert store.fingerprints() == [other]

    def test_stats_count_chunks_and_bytes(self, store: IndexedStore) -> None:
        other = replace(TINY, model="large", dtype="bfloat16", block_size=8, store_bits=8)
        assert (store.stats().n_chunks, store.stats().bytes, store.stats().rows) == (0, 0, ())
        expected = {TINY.digest: 0, other.digest: 0}
        for fingerprint, n_chunks in ((TINY, 3), (other, 1)):
            for seed in range(n_chunks):
                chunk = chunk_for(store, seed, 30 + seed, fingerprint)
                store.put(chunk)
                layout = FileLayout.of_cache(chunk, store.namespace)
                expected[fingerprint.digest] += layout.file_size(chunk.key)
        stats = store.stats()
        assert (stats.n_chunks, stats.bytes) == (4, sum(expected.values()))
        assert set(stats.rows) == {
            FingerprintStats(
                model="tiny",
                dtype="float32",
                store_bits=4,
                block_size=4,
                prefix=TINY.prefix,
                format_version=5,
                chunks=3,
                bytes=expected[TINY.digest],
            ),
            FingerprintStats(
                model="large",
                dtype="bfloat16",
                store_bits=8,
                block_size=8,
                prefix=other.prefix,
                format_version=5,
                chunks=1,
                bytes=expected[other.digest],
            ),
        }

    def test_require_names_the_closest_and_the_next_step(self, store: IndexedStore) -> None:
        require(store, TINY)  # empty: nothing to be wrong about
        far = replace(TINY, model="far", weights="w9", rope="linear", n_layers=1, block_size=8)
        near = replace(TINY, model="near", weights="w2", store_bits=16)
        store.put(chunk_for(store, 1, fingerprint=far))
        store.put(chunk_for(store, 1, fingerprint=near))
        with pytest.raises(FingerprintMismatch) as caught:
            require(store, TINY)
        message = str(caught.value)
        for part in (
            "'tiny'",
            "weights is 'w0' here and 'w2' there",
            "ingest again, or give the model 'near'",
        ):
            assert part in message
        assert "rope" not in message and "far" not in message
        store.put(chunk_for(store, 1))
        require(store, TINY)
        require(store, replace(near, model="the same under another name"))
