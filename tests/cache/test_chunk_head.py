"""What a chunk file says about itself, to somebody who expects no fingerprint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from samkv_integrations.cache.chunk import ChunkCache, chunk_key
from samkv_integrations.cache.files.chunk_file import ChunkFile, FileLayout
from samkv_integrations.cache.index.index import Entry
from samkv_integrations.errors import CacheMiss
from tests.support.chunk_files import NAMESPACE, SECRET, encoded
from tests.support.chunks import random_chunk, tiny_fingerprint

FINGERPRINT = tiny_fingerprint(dtype="bfloat16", store_bits=8, weights="some weights")


def named(chunk: ChunkCache, namespace: str = NAMESPACE) -> ChunkCache:
    """The chunk under its own key."""
    ids = chunk.token_ids.tolist()
    return replace(chunk, key=chunk_key(SECRET, namespace, chunk.fingerprint.digest, ids))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def refusal(path: Path, data: bytes, secret: bytes = SECRET) -> str:
    path.write_bytes(data)
    with pytest.raises(CacheMiss) as caught:
        ChunkFile(path, secret=secret).text()
    return str(caught.value)


@pytest.mark.parametrize("text", ["", "Müller\n\ud800 \U0001f40b"], ids=ascii)
@pytest.mark.parametrize("namespace", ["", "Müller & co"])
def test_a_head_is_all_but_the_tensors(path: Path, text: str, namespace: str) -> None:
    chunk = named(random_chunk(3, 21, FINGERPRINT, text=text), namespace)
    data = encoded(chunk, namespace)
    path.write_bytes(data)
    with ChunkFile(path, secret=SECRET) as file:
        assert Entry.of_file(file) == Entry(
            fingerprint=FINGERPRINT, key=chunk.key, namespace=namespace, text=text,
            token_ids=chunk.token_ids.tolist(), n_bytes=len(data),
            used_at=path.stat().st_mtime,
        )  # fmt: skip


def test_a_head_is_not_read_from_what_is_no_sound_file(path: Path) -> None:
    chunk = named(random_chunk(3, 21, FINGERPRINT))
    data = encoded(chunk)
    assert refusal(path, data[:-1]).startswith("corrupt")
    assert refusal(path, data + b"\0").startswith("corrupt")
    assert refusal(path, data, bytes(32)).startswith("corrupt")
    layout = FileLayout.of(chunk, NAMESPACE)
    for name in ("token_ids", "text"):
        damaged = bytearray(data)
        damaged[len(data) - layout.size + layout.tensors[name].stop - 1] ^= 1
        assert refusal(path, bytes(damaged)).endswith(f": {name}")
    path.unlink()
    with pytest.raises(CacheMiss, match="absent"):
        ChunkFile(path, secret=SECRET)
