"""What a chunk file says about itself, to somebody who expects no fingerprint."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from samkv_integrations.cache.chunk import ChunkCache, chunk_key
from samkv_integrations.cache.chunk_head import Head, read_head
from samkv_integrations.cache.file_format import FileLayout
from samkv_integrations.cache.named_ids import token_ids_in
from samkv_integrations.errors import CacheMiss
from tests.support.chunk_files import NAMESPACE, SECRET, encoded
from tests.support.chunks import random_chunk, tiny_fingerprint
from tests.support.mutations import OBSTACLES

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
        read_head(path, secret)
    return str(caught.value)


@pytest.mark.parametrize("text", ["", "Müller\n\ud800 \U0001f40b"], ids=ascii)
@pytest.mark.parametrize("namespace", ["", "Müller & co"])
def test_a_head_is_all_but_the_tensors(path: Path, text: str, namespace: str) -> None:
    chunk = named(random_chunk(3, 21, FINGERPRINT, text=text), namespace)
    data = encoded(chunk, namespace)
    path.write_bytes(data)
    assert read_head(path, SECRET) == Head(
        key=chunk.key, namespace=namespace, fields=asdict(FINGERPRINT),
        token_ids=tuple(chunk.token_ids.tolist()), text=text, n_bytes=len(data),
    )  # fmt: skip


def test_a_head_is_not_read_from_what_is_no_sound_file(path: Path) -> None:
    chunk = named(random_chunk(3, 21, FINGERPRINT))
    data = encoded(chunk)
    assert refusal(path, data[:-1]).startswith("corrupt")
    assert refusal(path, data + b"\0").startswith("corrupt")
    assert refusal(path, data, bytes(32)).startswith("corrupt")
    assert refusal(path, encoded(random_chunk(3, 21, FINGERPRINT))).endswith(": key")
    assert refusal(path, encoded(chunk, "another")).endswith(": key")
    layout = FileLayout.of(chunk, NAMESPACE)
    for name in ("token_ids", "text"):
        damaged = bytearray(data)
        damaged[len(data) - layout.size + layout.tensors[name].stop - 1] ^= 1
        assert refusal(path, bytes(damaged)).endswith(f": {name}")
    path.unlink()
    with pytest.raises(CacheMiss, match="absent"):
        read_head(path, SECRET)


# -- files of older versions ---------------------------------------------------------------------


def older(ids: bytes, first: int, last: int) -> bytes:
    """A file whose table says that the token ids are somewhere."""
    table = {"checksums": {"data_offsets": [0, 8]}, "token_ids": {"data_offsets": [first, last]}}
    text = json.dumps(table).encode()
    header = struct.pack("<Q", len(text)) + text
    return header + struct.pack("<2I", zlib.crc32(header), zlib.crc32(ids)) + ids


def test_token_ids_of_older_versions(path: Path) -> None:
    ids = struct.pack("<3i", 7, -1, 2**31 - 1)
    path.write_bytes(older(ids, 8, 20))
    assert token_ids_in(path) == [7, -1, 2**31 - 1]
    for first, last in ((8, 2**40), (-1, 4), (20, 8), (2**70, 2**70 + 4)):
        path.write_bytes(older(ids, first, last))
        assert token_ids_in(path) is None
    path.write_bytes(encoded(named(random_chunk(3, 21, FINGERPRINT))))
    assert token_ids_in(path) is None


@pytest.mark.parametrize("name", sorted(OBSTACLES.keys() - {"unreadable"}))
def test_an_obstacle_holds_no_token_ids(path: Path, name: str) -> None:
    OBSTACLES[name].make(path)
    assert token_ids_in(path) is None
