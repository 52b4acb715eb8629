"""Forgetting on disk: what lies around a cache goes with it, and what is another's stays."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from samkv_integrations.cache.chunk import ChunkCache
from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.errors import StoreError
from tests.contracts.store_contract import TINY, chunk_for
from tests.support.old_store import OLD_DIGEST, old_key, old_store

SECRET = "The secret of Tobias."


@pytest.fixture
def store(tmp_path: Path) -> ChunkStore:
    return ChunkStore(tmp_path / "kv")


def put(store: ChunkStore, seed: int = 1) -> ChunkCache:
    chunk = replace(chunk_for(store, seed), text=SECRET)
    store.put(chunk)
    return chunk


def file_of(store: ChunkStore, chunk: ChunkCache) -> Path:
    return store.path / TINY.digest / chunk.key[:2] / f"{chunk.key}.safetensors"


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
    half = file.with_name(f"{file.name}.{'0' * 32}-0a1b.tmp")
    half.write_text(SECRET[:12])
    alone = file.with_name(f"{file.name[:2]}{'0' * 30}.safetensors.{'1' * 32}-0a1b.tmp")
    alone.write_text(f"{SECRET}\n")
    (store.path / "writers" / ("1" * 32)).touch()  # its process holds no lock on it any more
    assert store.forget(is_secret) == 1
    assert not plain_texts(store) and not list(file.parent.iterdir())


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
    store.index.database.close()
    for lost in store.path.glob("index-*"):
        lost.unlink()
    again = ChunkStore(store.path)
    again.forget(is_secret, [chunk.token_ids.tolist()])
    assert not plain_texts(again) and not file.exists()


def test_what_is_in_the_quarantine_goes_too(store: ChunkStore) -> None:
    store.quarantine(put(store).key, TINY)
    assert plain_texts(store)
    store.forget(is_secret)
    assert not plain_texts(store)


def test_chunks_of_an_older_format_go_too(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    keys = list(old_store(folder, token_ids=([5, 6, 7, 8], [9, 10])))
    store = ChunkStore(folder)
    named, unreadable = (folder / OLD_DIGEST / key[:2] / f"{key}.safetensors" for key in keys)
    for key, file, ids in zip(keys, (named, unreadable), ([5, 6, 7, 8], [1, 2]), strict=True):
        assert old_key(bytes(range(32)), ids) == key or ids == [1, 2]
        file.write_bytes(as_version_1_says(ids))
    # the second one is sound and holds other tokens, as another namespace's would
    assert store.forget(lambda body: body == "Old text.") == 1
    assert not named.exists() and not named.with_suffix(".txt").exists()
    assert unreadable.exists() and unreadable.with_suffix(".txt").exists()


def as_version_1_says(ids: list[int]) -> bytes:
    """The beginning of a file, with the checksums that every version has first."""
    tensors = struct.pack(f"<{len(ids)}i", *ids)
    table = {
        "__metadata__": {"format_version": "1"},
        "checksums": {"dtype": "U32", "shape": [2], "data_offsets": [0, 8]},
        "token_ids": {"dtype": "I32", "shape": [len(ids)], "data_offsets": [8, 8 + len(tensors)]},
    }
    text = json.dumps(table).encode()
    header = struct.pack("<Q", len(text)) + text
    return header + struct.pack("<2I", zlib.crc32(header), zlib.crc32(tensors)) + tensors


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
    store.forget(is_secret)  # its text has gone already, and the file goes with whatever is next
    assert not file_of(store, chunk).exists() and not plain_texts(store)


def test_two_processes_put_a_note_and_the_first_wins(store: ChunkStore) -> None:
    others = [ChunkStore(store.path) for _ in range(3)]
    kept = [each.put_note("owner", str(place), replace=False) for place, each in enumerate(others)]
    assert kept == [True, False, False] and store.note("owner") == "0"
