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
from samkv_integrations.cache.named_ids import token_ids_in
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
    text = file_of(store, chunk).with_suffix(".txt")
    half = text.with_name(f"{text.name}.abc123.tmp")
    half.write_text(SECRET[:12])
    alone = text.parent / f"{text.name[:2]}{'0' * 30}.txt.xyz.tmp"  # before it could be renamed
    alone.write_text(f"{SECRET}\n")
    assert store.forget(is_secret) == 2
    assert not plain_texts(store) and not list(text.parent.iterdir())


def test_a_sound_cache_of_another_namespace_stays(store: ChunkStore) -> None:
    tenant = ChunkStore(store.path, namespace="tenant")
    mine, theirs = put(store), put(tenant)
    assert mine.key != theirs.key
    assert store.forget(is_secret) == 1
    assert store.keys() == [theirs.key] and tenant.text(theirs.key) == SECRET
    assert tenant.forget(is_secret) == 1
    assert store.keys() == []


@pytest.mark.parametrize("damage", ["cut", "ids", "header", "empty", "not a file of ours"])
def test_a_damaged_cache_that_cannot_say_whose_it_is_goes(store: ChunkStore, damage: str) -> None:
    theirs = put(ChunkStore(store.path, namespace="tenant"))
    file = file_of(store, theirs)
    content = bytearray(file.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    place = json.loads(content[8 : 8 + length])["token_ids"]["data_offsets"][0]
    match damage:
        case "cut":
            del content[100:]
        case "ids":
            content[8 + length + place] ^= 1
        case "header":
            content[8 + length - 1] = ord("\t")
        case "empty":
            content = bytearray()
        case _:
            content = bytearray(b"\xff" * 50)
    file.write_bytes(content)
    assert token_ids_in(file) is None
    assert store.forget(is_secret) == 1
    assert not plain_texts(store) and not file.exists()


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

    def refuses(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuses)
    with pytest.raises(StoreError, match=f"cannot delete .*{chunk.key}.*Permission denied"):
        store.forget(is_secret)
    monkeypatch.undo()
    assert store.forget(is_secret) == 1


def test_the_text_goes_last_so_that_an_interruption_is_mended(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store)
    unlink, seen = Path.unlink, []

    def watched(path: Path, missing_ok: bool = False) -> None:
        seen.append(path.suffix)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", watched)
    store.forget(is_secret)
    assert seen == [".safetensors", ".txt"]


def test_two_processes_put_a_note_and_the_first_wins(store: ChunkStore) -> None:
    others = [ChunkStore(store.path) for _ in range(3)]
    kept = [each.put_note("owner", str(place), replace=False) for place, each in enumerate(others)]
    assert kept == [True, False, False] and store.note("owner") == "0"
