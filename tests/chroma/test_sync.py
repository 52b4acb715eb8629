"""Sync: whatever went past the link, caches and keys are those of the texts afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromadb
import pytest
from chromadb.config import Settings

from samkv_integrations import ChunkStore, Engine, MemoryStore
from samkv_integrations.chroma.client import KEY_FIELD, connect_collection, open_collection
from samkv_integrations.chroma.link import ChromaLink
from samkv_integrations.chroma.records import SyncResult
from samkv_integrations.errors import InvalidChunk, InvalidOption, StoreError, UnknownOption
from samkv_integrations.store import database
from tests.support.chroma_link import IDS, VECTOR, add_raw, any_bytes_of, client_of, link_of
from tests.support.chroma_server import HOST, free_port
from tests.support.costs import ONE_PASS
from tests.support.records import TEXTS, builtin
from tests.support.tested_runtime import model_class


@pytest.fixture
def link(tmp_path: Path) -> ChromaLink:
    return link_of(tmp_path)


def add(link: ChromaLink, texts: dict[str, str]) -> None:
    link.add(list(texts), list(texts.values()), [VECTOR] * len(texts))


def cached(link: ChromaLink) -> set[str]:
    return set(link.engine.store.keys(link.engine.fingerprint))


def keys_of(link: ChromaLink, *texts: str) -> set[str]:
    return {link.engine.key_of(text) for text in texts}


def linked(link: ChromaLink) -> dict[str, str | None]:
    rows = link.collection.get(include=["metadatas"])
    pairs = zip(rows["ids"], rows["metadatas"], strict=True)
    return {id_: (row or {}).get(KEY_FIELD) for id_, row in pairs}


def counts(result: SyncResult) -> tuple[int, ...]:
    """records, cached, linked, skipped, pruned, in grace."""
    return (
        result.n_records, result.n_cached, result.n_linked, result.n_skipped,
        result.n_pruned, result.n_in_grace,
    )  # fmt: skip


def evict_one(link: ChromaLink, *texts: str) -> tuple[str, ...]:
    """Leaves no room for the first one's cache; the texts, that one first."""
    engine = link.engine
    assert isinstance(engine.store, ChunkStore)
    engine.store.set_budget(max_bytes=engine.store.stats().bytes - 1)
    gone = [text for text in texts if not engine.is_cached(text)]
    assert len(gone) == 1
    return *gone, *(text for text in texts if text not in gone)


def grow_old(link: ChromaLink, *texts: str, seconds: float = 7200) -> None:
    """As if the caches of ``texts`` (all, without any) had been made long ago."""
    sql = "UPDATE chunks SET used_at = used_at - ? WHERE key = ?"
    keys = keys_of(link, *texts) or cached(link)
    with link.engine.store.index.transaction(writes=True) as connection:
        connection.executemany(sql, [(seconds, key) for key in keys])


class TestBuildAndLink:
    def test_builds_and_links_what_others_wrote(self, link: ChromaLink) -> None:
        add_raw(link, {"a": TEXTS[0], "b": f" {TEXTS[1]}\n", "c": TEXTS[0]}, source="x.txt")
        result = link.sync()
        assert counts(result) == (3, 2, 3, 0, 0, 0)
        assert result.seconds > 0 and result.bytes_freed == 0
        assert cached(link) == keys_of(link, *TEXTS[:2])
        assert linked(link) == {
            id_: link.engine.key_of(text)
            for id_, text in (("a", TEXTS[0]), ("b", TEXTS[1]), ("c", TEXTS[0]))
        }
        rows = link.collection.get(include=["metadatas", "documents"])
        assert all(row["source"] == "x.txt" for row in rows["metadatas"])
        assert rows["documents"] == [TEXTS[0], f" {TEXTS[1]}\n", TEXTS[0]]

    def test_twice_does_nothing_twice(
        self, link: ChromaLink, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        add_raw(link, dict(zip(IDS, TEXTS, strict=True)))
        link.sync()
        for owner, name in (
            (model_class(), "prefill"),
            (link.collection, "update"),
        ):
            monkeypatch.setattr(owner, name, _not_called)
        assert counts(link.sync(grace_s=0)) == (6, 0, 0, 0, 0, 0)

    def test_block_size_follows_the_first_chunks(self, tmp_path: Path) -> None:
        # the keys of records must be those of the block size that the first page settles
        collection = open_collection(tmp_path / "chroma", "town", create=True)
        link = ChromaLink(collection, Engine(builtin(), ChunkStore(tmp_path / "kv")))
        long = "\n\n".join(TEXTS * 2)
        add_raw(link, {"a": long})
        assert counts(link.sync(grace_s=0)) == (1, 1, 1, 0, 0, 0)
        assert linked(link) == {"a": link.engine.key_of(long)}
        again = ChromaLink(collection, Engine(builtin(), ChunkStore(tmp_path / "kv")))
        assert counts(again.sync(grace_s=0)) == (1, 0, 0, 0, 0, 0)

    def test_what_can_be_no_chunk_is_skipped_and_loses_its_key(self, link: ChromaLink) -> None:
        too_long = "word " * 5000
        with pytest.raises(InvalidChunk):
            link.engine.cache_chunks([too_long])
        add_raw(link, {"a": None, "b": " \n", "c": too_long, "d": TEXTS[0]}, samkv_key="0" * 32)
        assert counts(link.sync()) == (4, 1, 1, 3, 0, 0)
        only = link.engine.key_of(TEXTS[0])
        assert linked(link) == {"a": None, "b": None, "c": None, "d": only}

    def test_follows_a_text_that_was_changed_past_it(self, link: ChromaLink) -> None:
        add(link, {"a": TEXTS[0], "b": TEXTS[1]})
        link.collection.update(ids=["a"], documents=[TEXTS[2]], embeddings=[VECTOR])
        grow_old(link)
        assert counts(link.sync()) == (2, 1, 1, 0, 1, 0)
        assert cached(link) == keys_of(link, TEXTS[1], TEXTS[2])
        assert linked(link)["a"] == link.engine.key_of(TEXTS[2])

    def test_page_by_page(self, link: ChromaLink, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(client_of(link.collection), "get_max_batch_size", lambda: 4)
        add_raw(link, dict(zip(IDS, TEXTS, strict=True)))
        asked = []
        for name in ("get", "update"):
            call = getattr(link.collection, name)

            def counted(call: Any = call, **given: Any) -> Any:
                asked.append(len(given.get("ids") or ()))
                return call(**given)

            monkeypatch.setattr(link.collection, name, counted)
        assert counts(link.sync()) == (6, 6, 6, 0, 0, 0)
        assert max(asked) == 4
        assert len(cached(link)) == 6 and None not in linked(link).values()


class TestBudget:
    def test_what_had_to_make_room_is_not_computed_again(
        self, link: ChromaLink, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Or it would push out what is needed, and the next sync that again."""
        add(link, {"a": TEXTS[0], "b": TEXTS[1], "c": TEXTS[2]})
        gone, *left = evict_one(link, *TEXTS[:3])
        result = link.sync(grace_s=0)
        assert (result.n_evicted, result.n_cached, result.n_pruned) == (1, 0, 0)
        assert cached(link) == keys_of(link, *left)
        link.sync(build_missing=False)
        # what was lost otherwise is computed
        store, fingerprint = link.engine.store, link.engine.fingerprint
        store.file(link.engine.key_of(left[0]), fingerprint.digest).unlink()  # type: ignore[attr-defined]
        result = link.sync()
        assert (result.n_evicted, result.n_cached) == (1, 1)
        # and so is what somebody adds
        add(link, {gone: gone})
        assert link.engine.is_cached(gone)

    @pytest.mark.parametrize("room", ["for two", "for all"])
    def test_what_had_to_make_room_is_computed_again_once_there_is_room(
        self, link: ChromaLink, room: str
    ) -> None:
        add(link, {text: text for text in TEXTS[:4]})
        store = link.engine.store
        assert isinstance(store, ChunkStore)
        needed = store.stats().bytes
        store.set_budget(max_bytes=1)
        assert not cached(link)
        assert link.sync().n_evicted == 4
        of_last = link.engine.chunks.n_bytes(link.engine.chunks.refer(TEXTS[2:4]))
        store.set_budget(max_bytes=needed - of_last if room == "for two" else None)
        result = link.sync()
        assert result.n_cached == len(cached(link)) == 4 - result.n_evicted
        assert result.n_evicted == (2 if room == "for two" else 0)
        again = link.sync()
        assert (again.n_cached, again.n_evicted) == (0, result.n_evicted)

    def test_an_ingest_that_has_no_room_for_all(self, link: ChromaLink) -> None:
        add(link, {str(n): f"{TEXTS[n % 6]} {n}" for n in range(8)})
        store = link.engine.store
        assert isinstance(store, ChunkStore)
        store.set_budget(max_bytes=store.stats().bytes)
        texts = [f"{TEXTS[n % 6]} {n}" for n in range(10, 22)]
        result = link.add(texts, texts, [VECTOR] * len(texts))
        assert result.n_cached == 12 and result.n_evicted >= 4
        assert result.n_evicted == sum(not link.engine.is_cached(text) for text in texts)


class TestPrune:
    def test_deletes_what_a_raw_delete_left(self, link: ChromaLink) -> None:
        add(link, {"a": TEXTS[0], "b": TEXTS[1], "c": TEXTS[0]})
        link.collection.delete(ids=["a", "b"])
        grow_old(link)
        before = link.engine.store.stats().bytes
        assert counts(link.sync(prune=False)) == (1, 0, 0, 0, 0, 0)
        result = link.sync()
        assert counts(result) == (1, 0, 0, 0, 1, 0)
        assert result.bytes_freed == before - link.engine.store.stats().bytes > 0
        assert cached(link) == keys_of(link, TEXTS[0])
        assert link.engine.store.text(link.engine.key_of(TEXTS[1])) is None

    def test_young_caches_wait_for_their_records(self, link: ChromaLink) -> None:
        link.engine.cache_chunks(TEXTS[:2])
        grow_old(link, TEXTS[0], seconds=100)
        assert counts(link.sync(grace_s=1000)) == (0, 0, 0, 0, 0, 2)
        assert counts(link.sync(grace_s=50)) == (0, 0, 0, 0, 1, 1)
        assert cached(link) == keys_of(link, TEXTS[1])
        assert counts(link.sync(grace_s=0)) == (0, 0, 0, 0, 1, 0)

    def test_a_chunk_that_is_ingested_again_is_young_again(self, link: ChromaLink) -> None:
        """Between the cache that was there already and the record, another process may sync."""
        link.engine.cache_chunks(TEXTS[:2])
        grow_old(link)
        link.engine.cache_chunks(TEXTS[:1])
        assert counts(link.sync()) == (0, 0, 0, 0, 1, 1)
        assert cached(link) == keys_of(link, TEXTS[0])

    def test_other_collections_keep_what_they_need(self, link: ChromaLink, tmp_path: Path) -> None:
        other = link_of(tmp_path, "country")
        add(link, {"a": TEXTS[0], "b": TEXTS[1], "c": TEXTS[2]})
        add(other, {"z": TEXTS[0]})
        add_raw(other, {"raw": f"{TEXTS[1]} ", "none": None})  # without a key
        link.collection.delete(ids=["a", "b", "c"])
        assert counts(link.sync(grace_s=0)) == (0, 0, 0, 0, 1, 0)
        assert cached(link) == keys_of(link, TEXTS[0], TEXTS[1])
        client_of(other.collection).delete_collection("country")
        assert counts(link.sync(grace_s=0))[4] == 2
        assert not cached(link)

    def test_other_namespaces_are_left_alone(self, link: ChromaLink, tmp_path: Path) -> None:
        tenant = Engine(builtin(), ChunkStore(tmp_path / "kv", namespace="tenant"), block_size=8)
        for engine in (tenant, link.engine):
            engine.cache_chunks([TEXTS[0]])
        assert counts(link.sync(grace_s=0)) == (0, 0, 0, 0, 1, 0)
        assert not cached(link) and tenant.is_cached(TEXTS[0])

    def test_caches_of_other_models_go_with_the_last_record(
        self, link: ChromaLink, tmp_path: Path
    ) -> None:
        """Before, they stayed for good, and with them the text."""
        other = Engine(builtin(), ChunkStore(tmp_path / "kv"), block_size=16)
        assert other.fingerprint != link.engine.fingerprint
        neighbour = link_of(tmp_path, "country")
        other.cache_chunks([TEXTS[0], TEXTS[1], f"{TEXTS[2]}\n"])
        add_raw(link, {"a": TEXTS[0]})
        add_raw(neighbour, {"z": f" {TEXTS[2]}"})
        assert counts(link.sync(build_missing=False))[4:] == (0, 1)  # young
        assert counts(link.sync(build_missing=False, grace_s=0))[4:] == (1, 0)
        assert [other.is_cached(text) for text in TEXTS[:3]] == [True, False, True]

    def test_a_text_whose_cache_went_for_want_of_room(self, link: ChromaLink) -> None:
        add(link, {"a": TEXTS[0], "b": TEXTS[1]})
        gone, left = evict_one(link, *TEXTS[:2])
        link.collection.delete(ids=["a", "b"])
        assert link.engine.store.text(link.engine.key_of(gone)) == gone
        assert counts(link.sync(grace_s=0))[4] == 2
        assert not any_bytes_of(link, gone) and not any_bytes_of(link, left)

    def test_a_file_that_a_killed_process_did_not_index(self, link: ChromaLink) -> None:
        """The first sync finds it, not the one after it."""
        add(link, {"a": TEXTS[0], "b": TEXTS[1]})
        store = link.engine.store
        assert isinstance(store, ChunkStore)
        file = store.file(link.engine.key_of(TEXTS[0]), link.engine.fingerprint.digest)
        data = file.read_bytes()
        link.delete(["a"])
        file.write_bytes(data)
        assert cached(link) == keys_of(link, TEXTS[1])
        assert counts(link.sync())[4:] == (0, 1)  # young
        assert counts(link.sync(grace_s=0))[4] == 1
        assert not any_bytes_of(link, TEXTS[0])
        file.write_bytes(data)
        assert counts(link.sync(grace_s=0))[4] == 1
        assert counts(link.sync(grace_s=0))[4] == 0

    @pytest.mark.parametrize("grace_s", [0, 3600])
    def test_a_file_that_no_record_names_evicts_no_cache_of_a_record(
        self, link: ChromaLink, grace_s: float
    ) -> None:
        """A killed process left it, and others filled the store up to its budget meanwhile."""
        store, engine = link.engine.store, link.engine
        assert isinstance(store, ChunkStore)
        add(link, {"a": TEXTS[0], "b": TEXTS[1], "x": TEXTS[2]})
        file = store.file(engine.key_of(TEXTS[2]), engine.fingerprint.digest)
        data = file.read_bytes()
        link.delete(["x"])
        engine.delete([])
        store.set_budget(max_bytes=store.stats().bytes)
        file.write_bytes(data)
        for _ in range(2):
            assert link.sync(grace_s=grace_s).n_evicted == 0
            assert cached(link) == keys_of(link, *TEXTS[:2])
        assert not file.exists()

    def test_a_folder_in_step_that_can_only_be_read(
        self, link: ChromaLink, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """There is nothing to do, and nothing to write."""
        add(link, {"a": TEXTS[0], "b": TEXTS[1]})

        class Refused(database.FileLock):  # type: ignore[misc]
            def acquire(self, *_: Any, **__: Any) -> Any:
                raise PermissionError(13, "Permission denied", self.lock_file)

        monkeypatch.setattr(database, "FileLock", Refused)
        assert counts(link.sync()) == (2, 0, 0, 0, 0, 0)

    def test_in_memory(self) -> None:
        client = chromadb.EphemeralClient(settings=Settings(anonymized_telemetry=False))
        collection = client.get_or_create_collection("memory", embedding_function=None)
        link = ChromaLink(collection, Engine(builtin(), MemoryStore()))
        add(link, {"a": TEXTS[0], "b": TEXTS[1]})
        collection.delete(ids=["b"])
        assert counts(link.sync()) == (1, 0, 0, 0, 0, 1)
        assert counts(link.sync(grace_s=0)) == (1, 0, 0, 0, 1, 0)
        assert link.delete(["a"]) == 1 and not cached(link)
        client.delete_collection("memory")


class TestRelease:
    def test_keeps_what_a_record_of_any_collection_references(
        self, link: ChromaLink, tmp_path: Path
    ) -> None:
        other = link_of(tmp_path, "country")
        add(link, {"a": TEXTS[0], "b": TEXTS[1]})
        add(other, {"z": TEXTS[1]})
        link.engine.cache_chunks([TEXTS[2]])
        assert link.release(keys_of(link, *TEXTS[:3])) == 1
        assert link.release(keys_of(link, *TEXTS[:3])) == link.release([]) == 0
        assert cached(link) == keys_of(link, *TEXTS[:2])

    @pytest.mark.parametrize("size", [2, 5461])
    def test_keys_that_many_records_share(
        self, link: ChromaLink, monkeypatch: pytest.MonkeyPatch, size: int
    ) -> None:
        monkeypatch.setattr(client_of(link.collection), "get_max_batch_size", lambda: size)
        add(link, {**{f"many-{n}": TEXTS[0] for n in range(20)}, "b": TEXTS[1], "c": TEXTS[2]})
        link.engine.cache_chunks(TEXTS)
        assert link.release(keys_of(link, *TEXTS)) == 3
        assert cached(link) == keys_of(link, *TEXTS[:3])

    def test_delete_by_id_and_by_metadata(self, link: ChromaLink) -> None:
        texts = [TEXTS[0], TEXTS[1], TEXTS[1], TEXTS[2], TEXTS[3]]
        kinds = [{"kind": kind} for kind in ("x", "y", "x", "y", "y")]
        link.add(IDS[:5], texts, [VECTOR] * 5, kinds)
        assert link.delete(["a", "a", "nobody"]) == 1
        assert link.delete(["b"]) == 0  # "c" has the same text
        assert link.delete(["c", "d"], {"kind": "y"}) == 1
        assert set(linked(link)) == {"c", "e"}
        assert link.delete(where={"kind": "x"}) == 1
        assert cached(link) == keys_of(link, TEXTS[3])
        assert link.delete(where={"kind": "z"}) == 0
        assert link.clear() == 1
        assert link.clear() == 0
        assert not cached(link) and link.collection.count() == 0

    def test_replacing_a_record_releases_its_old_text(self, link: ChromaLink) -> None:
        add(link, {"a": TEXTS[0], "b": TEXTS[1], "c": TEXTS[1]})
        add(link, {"a": TEXTS[2], "b": TEXTS[3]})
        assert cached(link) == keys_of(link, TEXTS[1], TEXTS[2], TEXTS[3])
        add(link, {"a": TEXTS[3], "b": TEXTS[2]})  # they change places
        assert cached(link) == keys_of(link, TEXTS[1], TEXTS[2], TEXTS[3])

    def test_a_deleted_text_is_not_held_in_memory_either(self, link: ChromaLink) -> None:
        add(link, {"a": TEXTS[0], "b": TEXTS[1]})
        engine, asked = link.engine, [f"{TEXTS[0]}\n\n{question}" for question in ("Q?", "Why?")]
        engine.costs = ONE_PASS  # full prefill, which leaves the document in memory
        ran = [engine.generate(a, TEXTS[:1], max_new_tokens=1).report.ran for a in asked]
        assert ran == ["recompute", "prefix"]
        link.delete(["b"])
        assert engine.generate(asked[1], TEXTS[:1], max_new_tokens=1).report.ran == "recompute"

    def test_replacing_a_record_replaces_its_metadata(self, link: ChromaLink) -> None:
        # Chroma's own upsert merges, so that a field would outlive the record it belonged to
        link.add(["a"], TEXTS[:1], [VECTOR], [{"source": "x", "page": 1}])
        link.add(["a"], TEXTS[:1], [VECTOR], [{"source": "y"}])
        key = link.engine.key_of(TEXTS[0])
        assert link.collection.get()["metadatas"] == [{"source": "y", KEY_FIELD: key}]
        link.add(["a"], ["an image"], [VECTOR], without_cache={"a"})
        assert link.collection.get()["metadatas"] == [None]
        assert not cached(link)

    def test_a_broken_cache_counts_as_computed(self, link: ChromaLink) -> None:
        add(link, {"a": TEXTS[0], "b": TEXTS[1]})
        (file,) = link.engine.store.path.glob(  # type: ignore[attr-defined]
            f"*/*/{link.engine.key_of(TEXTS[0])}.safetensors"
        )
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        result = link.add(["a", "b"], TEXTS[:2], [VECTOR] * 2)
        assert (result.n_cached, result.n_hit) == (1, 1)
        assert link.engine.is_cached(TEXTS[0])

    def test_a_refused_record_leaves_a_cache_that_sync_prunes(self, link: ChromaLink) -> None:
        with pytest.raises(InvalidOption, match=r"stay cached until .* pruned by sync\): .*dict"):
            link.add(["a"], TEXTS[:1], [VECTOR], [{"nested": {}}])
        assert counts(link.sync(grace_s=0)) == (0, 0, 0, 0, 1, 0)


class TestTrouble:
    def test_a_folder_of_caches_that_was_removed(self, link: ChromaLink, tmp_path: Path) -> None:
        add(link, {"a": TEXTS[0]})
        (tmp_path / "kv").rename(tmp_path / "away")
        for use in (
            link.sync,
            lambda: link.sync(build_missing=False),
            lambda: link.release(["0" * 32]),
        ):
            with pytest.raises(StoreError, match=r"kv.*next step"):
                use()
        again = link_of(tmp_path)  # an empty folder, a new secret
        assert counts(again.sync()) == (1, 1, 1, 0, 0, 0)
        assert linked(again) == {"a": again.engine.key_of(TEXTS[0])}

    def test_a_folder_that_can_only_be_read(
        self, link: ChromaLink, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        add(link, {"a": TEXTS[0], "b": TEXTS[1]})

        def refuse(*_: Any, **__: Any) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "unlink", refuse)
        with pytest.raises(StoreError, match="cannot delete .*: Permission denied; next step"):
            link.delete(["a"])
        assert set(linked(link)) == {"b"}
        assert link.engine.cache_chunks([TEXTS[1]])[0]  # a hit needs no permission
        monkeypatch.undo()
        assert any_bytes_of(link, TEXTS[0])
        link.sync(grace_s=0)
        assert not any_bytes_of(link, TEXTS[0])

    def test_another_collection_that_is_deleted_meanwhile(
        self, link: ChromaLink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = link_of(tmp_path, "country")
        add(other, {"z": TEXTS[0]})
        client = client_of(link.collection)
        listed = client.list_collections()
        client_of(other.collection).delete_collection("country")
        monkeypatch.setattr(client, "list_collections", lambda **where: listed)
        assert link.release(keys_of(link, TEXTS[0])) == 1
        assert counts(link.sync(grace_s=0)) == (0, 0, 0, 0, 0, 0)

    @pytest.mark.slow  # a process each, which imports torch, transformers and Chroma
    @pytest.mark.parametrize("moment", ["put 3", "update 2"])
    def test_killed_in_the_middle(self, tmp_path: Path, moment: str) -> None:
        """The process is killed just before the n-th cache, or page of keys, is written."""
        made = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path), *moment.split()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            cwd=Path(__file__).parents[2],
        )
        assert made.stdin and made.stdout
        with made:
            assert made.stdout.readline() == b"now\n"
            made.kill()
        link = link_of(tmp_path)
        n_cached, n_linked = len(cached(link)), len(set(linked(link).values()) - {None})
        assert (n_cached, n_linked) == {"put 3": (2, 2), "update 2": (4, 2)}[moment]
        assert counts(link.sync()) == (6, 6 - n_cached, 6 - n_linked, 0, 0, 0)
        assert cached(link) == keys_of(link, *TEXTS)
        assert set(linked(link).values()) == cached(link)
        assert counts(link.sync(grace_s=0)) == (6, 0, 0, 0, 0, 0)


KILLED = """
import sys
from pathlib import Path
from tests.support.chroma_link import IDS, add_raw, client_of, link_of
from tests.support.records import TEXTS

folder, name, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
link = link_of(folder)
client_of(link.collection).get_max_batch_size = lambda: 2
add_raw(link, dict(zip(IDS, TEXTS)))
owner = link.engine.store if name == "put" else link.collection
call, calls = getattr(owner, name), []

def last(*given, **named):
    calls.append(1)
    if len(calls) == number:
        print("now", flush=True)
        sys.stdin.readline()  # until it is killed
    call(*given, **named)

setattr(owner, name, last)
link.sync()
"""


class TestServer:
    @pytest.fixture
    def served(self, chroma_port: int, tmp_path: Path) -> Iterator[ChromaLink]:
        collection = connect_collection(HOST, chroma_port, "town", create=True)
        yield ChromaLink(collection, Engine(builtin(), ChunkStore(tmp_path / "kv"), block_size=8))
        client_of(collection).delete_collection("town")

    def test_the_whole_life_of_records(self, served: ChromaLink) -> None:
        add(served, {"a": TEXTS[0], "b": TEXTS[1], "c": TEXTS[1]})
        assert served.query(VECTOR, 1)[0].text in TEXTS
        add_raw(served, {"d": TEXTS[2]})
        served.collection.delete(ids=["a"])
        assert counts(served.sync(grace_s=0)) == (3, 1, 1, 0, 1, 0)
        assert cached(served) == keys_of(served, TEXTS[1], TEXTS[2])
        assert served.delete(["b"]) == 0
        assert served.delete(where={KEY_FIELD: served.engine.key_of(TEXTS[1])}) == 1
        with pytest.raises(InvalidOption, match="dimension 1 does not fit .* dimension 2"):
            served.add(["x"], TEXTS[:1], [[1.0]])
        assert served.clear() == 1 and not cached(served)

    def test_two_clients_see_each_other(self, served: ChromaLink, chroma_port: int) -> None:
        other = connect_collection(HOST, chroma_port, "town", create=False)
        other.add(ids=["z"], documents=[TEXTS[3]], embeddings=[VECTOR])
        assert counts(served.sync()) == (1, 1, 1, 0, 0, 0)
        (row,) = other.get()["metadatas"] or ()
        assert row == {KEY_FIELD: served.engine.key_of(TEXTS[3])}

    def test_opening(self, served: ChromaLink, chroma_port: int) -> None:
        with pytest.raises(UnknownOption, match="collection 'twon'; known: .*town"):
            connect_collection(HOST, chroma_port, "twon", create=False)
        assert served.collection._embedding_function is None
        assert not client_of(served.collection).get_settings().anonymized_telemetry

    def test_no_server(self) -> None:
        port = free_port()
        with pytest.raises(InvalidOption, match=f"Chroma at {HOST}:{port} cannot be reached"):
            connect_collection(HOST, port, "town", create=True)


def test_a_server_that_goes_away(served_once: tuple[ChromaLink, Any]) -> None:
    link, stop = served_once
    add(link, {"a": TEXTS[0]})
    stop()
    for use in (link.sync, link.clear, lambda: add(link, {"b": TEXTS[1]})):
        with pytest.raises(InvalidOption, match="Chroma|'cut-off'"):
            use()
    assert len(cached(link)) == 1


@pytest.fixture
def served_once(chroma_port: int, tmp_path: Path) -> tuple[ChromaLink, Any]:
    """A link whose connection can be cut; the server itself stays for other tests."""
    collection = connect_collection(HOST, chroma_port, "cut-off", create=True)
    link = ChromaLink(collection, Engine(builtin(), ChunkStore(tmp_path / "kv"), block_size=8))

    def stop() -> None:
        client_of(collection)._api_url = f"http://{HOST}:{free_port()}/api/v2"  # type: ignore[attr-defined]

    return link, stop


def _not_called(*arguments: object, **named: object) -> None:
    raise AssertionError("nothing should have been computed or written")
