"""Damaged chunk files and what is no file: each is a miss or read as it was; no crash, no hang."""

from __future__ import annotations

import faulthandler
import os
import random
import shutil
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samkv_integrations.errors import MISS_REASONS, CacheMiss
from samkv_integrations.store.chunk import ChunkCache, Fingerprint, chunk_key
from samkv_integrations.store.chunk_file import ChunkFile
from tests.support.chunk_files import NAMESPACE, SECRET, encoded, open_file, read_all
from tests.support.chunks import TINY, random_chunk

WATCHED_S = 120  # for a hundred files; a hang is told, with where it hangs
# As small as they get: 5 blocks, of which 1 and 2 are the middle and 4 is short.
SMALL = replace(TINY, n_heads=2, n_kv_heads=1, head_dim=4, block_size=2)


def chunk_of(seed: int, namespace: str = NAMESPACE, weights: str = "w0") -> ChunkCache:
    chunk = random_chunk(seed, 9, replace(SMALL, weights=weights))
    key = chunk_key(SECRET, namespace, chunk.fingerprint.digest, chunk.token_ids.tolist())
    return replace(chunk, key=key)


CHUNK = chunk_of(1)
SOUND, SIBLING = encoded(CHUNK), encoded(chunk_of(2))
assert len(SIBLING) == len(SOUND)
# Sound files, each of which would be another chunk, tenant, model or store in this one's place.
STRANGERS = (
    SIBLING,
    encoded(chunk_of(1, "another tenant"), "another tenant"),
    encoded(chunk_of(1, weights="w1")),
    encoded(CHUNK, secret=bytes(32)),
)


def span(rng: random.Random) -> tuple[int, int]:
    """First byte and the one after the last of a range, as often short as long."""
    first = rng.randrange(len(SOUND))
    return first, min(len(SOUND), first + rng.choice((1, 16, 64, 400)))


def flipped(rng: random.Random) -> bytes:
    data = bytearray(SOUND)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def overwritten(rng: random.Random) -> bytes:
    first, stop = span(rng)
    n = stop - first
    return SOUND[:first] + rng.choice((bytes(n), b"\xff" * n, rng.randbytes(n))) + SOUND[stop:]


def cut(rng: random.Random) -> bytes:
    return SOUND[: rng.choice((0, 7, 8, 24, rng.randrange(len(SOUND)), len(SOUND) - 1))]


def extended(rng: random.Random) -> bytes:
    more = rng.randrange(1, 5000)
    return SOUND + rng.choice((bytes(more), rng.randbytes(more), SOUND[-more:]))


def shifted(rng: random.Random) -> bytes:
    """Some bytes more or less in the middle."""
    at, n = rng.randrange(len(SOUND)), rng.randrange(1, 64)
    return rng.choice((SOUND[:at] + rng.randbytes(n) + SOUND[at:], SOUND[:at] + SOUND[at + n :]))


def regions_swapped(rng: random.Random) -> bytes:
    n = rng.choice((8, 16, 64, 200))
    a = rng.randrange(len(SOUND) - 2 * n)
    c = rng.randrange(a + n, len(SOUND) - n)
    return SOUND[:a] + SOUND[c : c + n] + SOUND[a + n : c] + SOUND[a : a + n] + SOUND[c + n :]


def region_of_a_sibling(rng: random.Random) -> bytes:
    """From another file of this store and fingerprint."""
    first, stop = span(rng)
    return SOUND[:first] + SIBLING[first:stop] + SOUND[stop:]


def stranger(rng: random.Random) -> bytes:
    return rng.choice(STRANGERS)


def header_length(rng: random.Random) -> bytes:
    length = rng.choice((0, 1, 2**20, 2**20 + 1, 2**63, 2**64 - 1, rng.randrange(2**64)))
    rest = rng.choice((SOUND[8:], bytes(rng.randrange(2000)), b"[" * 100_000, b'{"a":' * 10_000))
    return length.to_bytes(8, "little") + rest


CONTENTS = (
    flipped, overwritten, cut, extended, shifted, regions_swapped, region_of_a_sibling, stranger,
    header_length,
)  # fmt: skip


def full_folder(path: Path) -> None:
    path.mkdir()
    (path / "file").write_bytes(SOUND)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end, tempfile.TemporaryDirectory() as short:
        end.bind(f"{short}/s")  # a socket's path is short
        os.rename(f"{short}/s", path)


def link_to_sound(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    elsewhere.write_bytes(SOUND)
    path.symlink_to(elsewhere)


def unreadable(path: Path) -> None:
    path.write_bytes(SOUND)
    path.chmod(0)


def sparse(path: Path) -> None:
    path.write_bytes(SOUND)
    os.truncate(path, 2**40)


OBSTACLES: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "full folder": full_folder,
    "pipe": os.mkfifo,
    "socket": a_socket,
    "link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "link to a folder": lambda path: path.symlink_to("/"),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to itself": lambda path: path.symlink_to("chunk.safetensors"),
    "link to a sound file": link_to_sound,
    "unreadable": unreadable,
    "a terabyte": sparse,
}


def blocks_of(layer: int, blocks: list[int]) -> Callable[[ChunkFile], object]:
    def read(stored: ChunkFile) -> object:
        spans = [CHUNK.blocks.span(block) for block in blocks]
        n_rows = sum(stop - first for first, stop in spans)
        out = np.empty((n_rows, CHUNK.entries.shape[-1]), np.uint8)
        stored.read_blocks(layer, blocks, out)
        return out

    return read


READS: dict[str, Callable[[ChunkFile], Any]] = {
    "token_ids": lambda stored: stored.token_ids,
    "outliers": lambda stored: stored.array("outliers"),
    "text": lambda stored: stored.text(),
    "local_query": lambda stored: stored.array("local_query"),
    "summary_codes": lambda stored: stored.array("summary_codes"),
    "summary_scale": lambda stored: stored.array("summary_scale"),
    "key_range": lambda stored: stored.array("key_range"),
    "all": read_all,
    "some blocks": blocks_of(1, [1, 2, 4]),
    "one block": blocks_of(0, [3]),
    "chunk": lambda stored: stored.chunk(),
    "verify": lambda stored: stored.verify(),
}


def content(found: object) -> object:
    """Something that can be compared: arrays become dtype, shape and bytes."""
    if isinstance(found, np.ndarray):
        return found.dtype, found.shape, found.tobytes()
    if isinstance(found, dict):
        return {name: content(each) for name, each in found.items()}
    if is_dataclass(found) and not isinstance(found, Fingerprint):
        return {each.name: content(getattr(found, each.name)) for each in fields(found)}
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chunk.safetensors"


@pytest.fixture
def expected(path: Path) -> dict[str, object]:
    """What each read of the sound file gives."""
    path.write_bytes(SOUND)
    with open_file(path, CHUNK) as stored:
        found = {name: content(read(stored)) for name, read in READS.items()}
    assert found["chunk"] == content(CHUNK) and found["all"] == content(CHUNK.entries)
    path.unlink()
    return found


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    """Ends the process with a traceback if it hangs: a read that waits may not be interruptible."""
    faulthandler.dump_traceback_later(WATCHED_S, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


def head(file: ChunkFile) -> object:
    about = file.key, file.layout.namespace, file.layout.fingerprint
    return *about, file.token_ids.tolist(), file.text()


def outcome(path: Path, expected: dict[str, object], rng: random.Random) -> str:
    """``sound``, or the reasons for which reads were refused. Fails on a wrong tensor."""
    reasons: set[str] = set()
    try:
        with open_file(path, CHUNK) as stored:
            for name in rng.sample(list(READS), len(READS)):
                try:
                    found = content(READS[name](stored))
                except CacheMiss as miss:
                    reasons.add(miss.reason)
                else:
                    assert found == expected[name], name
    except CacheMiss as miss:
        reasons.add(miss.reason)
    try:  # as who rebuilds an index, and expects nothing
        with ChunkFile(path, secret=SECRET) as file:
            ids, text = CHUNK.token_ids.tolist(), CHUNK.text
            is_ours = head(file) == (CHUNK.key, NAMESPACE, CHUNK.fingerprint, ids, text)
            # a sound file of another chunk has a sound head
            assert is_ours or reasons & {"fingerprint", "tokens"}
    except CacheMiss as miss:
        assert reasons, f"only who expects nothing is refused: {miss}"
        reasons.add(miss.reason)
    assert reasons <= set(MISS_REASONS)
    return " ".join(sorted(reasons)) or "sound"


@pytest.mark.parametrize(
    "n_files", [500, pytest.param(10_000, marks=pytest.mark.slow)]  # minutes
)  # fmt: skip
def test_mutated_files(path: Path, expected: dict[str, object], n_files: int) -> None:
    rng, counts = random.Random(n_files), Counter[str]()
    for n in range(n_files):
        if n % 100 == 0:
            faulthandler.dump_traceback_later(WATCHED_S, exit=True, file=sys.__stderr__)
        mutate = rng.choice(CONTENTS)
        data = mutate(rng)
        path.write_bytes(data)
        assert (outcome(path, expected, rng) == "sound") == (data == SOUND), mutate.__name__
        counts[mutate.__name__] += data != SOUND
    assert set(counts) == {mutate.__name__ for mutate in CONTENTS} and min(counts.values()) > 10


@pytest.mark.parametrize("name", OBSTACLES)
def test_what_is_no_file_is_a_miss(path: Path, expected: dict[str, object], name: str) -> None:
    """It is neither waited for nor followed."""
    OBSTACLES[name](path)
    # root reads everything
    reasons = ("io", "sound") if name == "unreadable" else ("corrupt",)
    assert outcome(path, expected, random.Random(1)) in reasons
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
