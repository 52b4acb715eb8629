"""Forgetting on disk: what lies around a cache goes with it, and what is another's stays."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from samkv_integrations.errors import StoreError
from samkv_integrations.store.chunk import ChunkCache
from samkv_integrations.store.disk import ChunkStore
from samkv_integrations.store.upkeep import gc, verify
from tests.contracts.store_contract import TINY, chunk_for

SECRET = "The secret of Tobias."


@pytest.fixture
def store(tmp_path: Path) -> ChunkStore:
    return ChunkStore(tmp_path / "kv")


def put(store: ChunkStore, seed: int = 1) -> ChunkCache:
    chunk = replace(chunk_for(store, seed), text=SECRET)
    store.put(chunk)
    return chunk


def file_of(store: ChunkStore, chunk: ChunkCache) -> Path:
    return store.file(chunk.key, TINY.digest)


def is_secret(body: str) -> bool:
    return body == SECRET


def plain_texts(store: ChunkStore) -> list[Path]:
    return [
        path
        for path in store.path.rglob("*")
        if path.is_file() and SECRET[:10].encode() in path.read_bytes()
    ]


def test_a_text_without_a_cache_goes_too(store: ChunkStore) -> None:
    chunk = put(store)
    file_of(store, chunk).unlink()
    assert plain_texts(store)
    assert store.forget(is_secret) == 1
    assert not plain_texts(store)


def test_what_a_killed_writer_left_goes_too(store: ChunkStore) -> None:
    chunk = put(store)
    file = file_of(store, chunk)
    half = file.with_name(f"{file.name}.{'0' * 16}.tmp")
    half.write_text(SECRET[:12])
    os.utime(half, (0, 0))
    assert store.forget(is_secret) == 1
    assert not plain_texts(store) and not list(file.parent.iterdir())


def left_by_a_killed_writer(store: ChunkStore, seed: int) -> ChunkCache:
    """A chunk whose file is there, and which the index was not told of."""
    chunk = put(store, seed)
    content = file_of(store, chunk).read_bytes()
    store.index.delete("", [chunk.key])
    file_of(store, chunk).write_bytes(content)
    return chunk


def test_a_cache_that_a_killed_writer_left_goes_by_its_key(store: ChunkStore) -> None:
    chunk = left_by_a_killed_writer(store, 1)
    assert store.keys() == [] and file_of(store, chunk).exists()
    assert store.delete(chunk.key) == 1
    assert not file_of(store, chunk).exists() and not plain_texts(store)
    other = left_by_a_killed_writer(store, 2)
    assert ChunkStore(store.path, namespace="tenant").delete(other.key) == 0
    assert file_of(store, other).exists()


def test_caches_of_another_namespace_stay(store: ChunkStore) -> None:
    tenant = ChunkStore(store.path, namespace="tenant")
    mine, theirs = put(store), put(tenant)
    assert mine.key != theirs.key
    assert store.forget(is_secret) == 1
    assert store.keys() == [] and tenant.keys() == [theirs.key]
    assert tenant.text(theirs.key) == SECRET
    assert tenant.forget(is_secret) == 1
    assert not plain_texts(store)


@pytest.mark.parametrize("content", [b"", b"\xff" * 50, None])
def test_a_damaged_cache_goes_by_its_tokens_too(store: ChunkStore, content: bytes | None) -> None:
    """Though the index, which knew its text, was lost."""
    chunk = put(store)
    file = file_of(store, chunk)
    file.write_bytes(file.read_bytes()[:-1] if content is None else content)
    store.index.close()
    for lost in store.path.glob("index-*"):
        lost.unlink()
    again = ChunkStore(store.path)
    again.forget(is_secret, [chunk.token_ids.tolist()])
    assert not plain_texts(again) and not file.exists()


def test_the_text_of_a_damaged_cache_goes_too(store: ChunkStore) -> None:
    store.quarantine(put(store).key, TINY)
    assert plain_texts(store)
    store.forget(is_secret)
    assert not plain_texts(store)


def change(store: ChunkStore, sql: str) -> None:
    with store.index.transaction(writes=True) as connection:
        connection.execute(sql)


@pytest.mark.parametrize("by_key", [False, True])
def test_a_cache_whose_text_the_index_has_lost_goes_too(store: ChunkStore, by_key: bool) -> None:
    """It was not found, and stayed. The text is in the file: the index is made anew from it."""
    chunk = put(store)
    change(store, "DELETE FROM texts")

    def delete() -> int:
        return store.delete(chunk.key) if by_key else store.forget(is_secret)

    with pytest.raises(StoreError, match="made anew.*try again"):
        delete()
    assert delete() == 1
    assert not store.contains(chunk.key, TINY) and not plain_texts(store)


@pytest.mark.parametrize("name", ["key", "digest"])
def test_a_chunk_of_a_broken_name_is_no_obstacle(store: ChunkStore, name: str) -> None:
    """The index names a file that there cannot be, and not the one that there is."""
    chunk = put(store)
    change(store, f"UPDATE chunks SET {name} = '../x'")
    assert verify(store).damaged == ()
    gc(store)
    change(store, f"UPDATE chunks SET {name} = '../x'")
    assert store.forget(is_secret) >= 1
    assert not store.contains(chunk.key, TINY) and not plain_texts(store)


def test_what_cannot_be_deleted_is_named(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = put(store)
    unlink = Path.unlink

    def refuses(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuses)
    with pytest.raises(StoreError, match=f"cannot delete .*{chunk.key}.*Permission denied"):
        store.forget(is_secret)
    monkeypatch.undo()
    store.forget(is_secret)
    assert not file_of(store, chunk).exists() and not plain_texts(store)
