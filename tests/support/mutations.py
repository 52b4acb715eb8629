"""Ways to damage and to forge the file of a chunk, drawn at random."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import socket
import struct
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from blake3 import blake3

from samkv_integrations.cache.chunk import ChunkCache, chunk_key
from samkv_integrations.cache.files.chunk_file import FileLayout
from tests.support.chunk_files import NAMESPACE, SECRET, encoded
from tests.support.chunks import random_chunk, tiny_fingerprint

N_TOKENS = 9
# As small as they get: 5 blocks, of which 1 and 2 are the middle and 4 is short.
SMALL = tiny_fingerprint(n_heads=2, n_kv_heads=1, head_dim=4, block_size=2)


def _chunk(seed: int, namespace: str = NAMESPACE, weights: str = "w0") -> ChunkCache:
    chunk = random_chunk(seed, N_TOKENS, replace(SMALL, weights=weights))
    key = chunk_key(SECRET, namespace, chunk.fingerprint.digest, chunk.token_ids.tolist())
    return replace(chunk, key=key)


CHUNK = _chunk(1)
SOUND = encoded(CHUNK)
SIBLING = encoded(_chunk(2))
_LAYOUT = FileLayout.of(CHUNK, NAMESPACE)
_HEADER = len(SOUND) - _LAYOUT.size
assert len(SIBLING) == len(SOUND)
# Sound files, each of which would be another chunk, tenant, model or store in this one's place.
STRANGERS = (
    SIBLING,
    encoded(_chunk(1, "another tenant"), "another tenant"),
    encoded(_chunk(1, weights="w1")),
    encoded(CHUNK, secret=bytes(32)),
)


def _places() -> dict[str, list[tuple[int, int]]]:
    """First byte and the one after the last of every region, by kind; empty ones left out."""
    places = {"length": [(0, 8)], "json": [(8, _HEADER)]}
    for name, place in _LAYOUT.tensors.items():
        if place.stop > place.start:
            places[name] = [(_HEADER + place.start, _HEADER + place.stop)]
    start = _HEADER + _LAYOUT.tensors["entries"].start
    places["entries"] = [
        (start + layer * _LAYOUT.layer_bytes + at, start + layer * _LAYOUT.layer_bytes + at + n)
        for layer in range(SMALL.n_layers)
        for at, n in _LAYOUT.block_places
    ]
    return places


PLACES = _places()
_MACS = PLACES["macs"][0][0]
_N_BLOCKS = len(PLACES["entries"])
_FIRST_BLOCK = _LAYOUT.tensors["macs"].shape[0] - _N_BLOCKS - SMALL.n_layers

Bytes = Callable[[random.Random], bytes]


def flipped(rng: random.Random) -> bytes:
    data = bytearray(SOUND)
    first, last = rng.choice(PLACES[rng.choice(list(PLACES))])
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        data[rng.randrange(first, last)] ^= 1 << rng.randrange(8)
    return bytes(data)


def overwritten(rng: random.Random) -> bytes:
    first, last = rng.choice(PLACES[rng.choice(list(PLACES))])
    new = rng.choice((bytes(last - first), b"\xff" * (last - first), rng.randbytes(last - first)))
    return SOUND[:first] + new + SOUND[last:]


def cut(rng: random.Random) -> bytes:
    return SOUND[: rng.choice((0, 7, 8, 24, rng.randrange(len(SOUND)), len(SOUND) - 1))]


def extended(rng: random.Random) -> bytes:
    more = rng.randrange(1, 5000)
    return SOUND + rng.choice((bytes(more), rng.randbytes(more), SOUND[-more:]))


def shifted(rng: random.Random) -> bytes:
    """Some bytes more or less in the middle."""
    at, n = rng.randrange(len(SOUND)), rng.randrange(1, 64)
    return rng.choice((SOUND[:at] + rng.randbytes(n) + SOUND[at:], SOUND[:at] + SOUND[at + n :]))


def _exchanged(data: bytes, one: tuple[int, int], other: tuple[int, int]) -> bytes:
    (a, b), (c, d) = sorted((one, other))
    return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


def regions_swapped(rng: random.Random) -> bytes:
    """Two blocks exchanged, or any two ranges; blocks half the time with their MACs."""
    if rng.random() < 0.3:
        n = rng.randrange(1, 200)
        a = rng.randrange(len(SOUND) - 2 * n)
        c = rng.randrange(a + n, len(SOUND) - n)
        return _exchanged(SOUND, (a, a + n), (c, c + n))
    blocks = PLACES["entries"]
    n_blocks = len(_LAYOUT.block_places)
    i, j = rng.sample([k for k in range(len(blocks)) if k % n_blocks != n_blocks - 1], 2)
    data = _exchanged(SOUND, blocks[i], blocks[j])
    if rng.random() < 0.5:
        data = _exchanged(data, _mac_place(_FIRST_BLOCK + i), _mac_place(_FIRST_BLOCK + j))
    return data


def _mac_place(position: int) -> tuple[int, int]:
    return _MACS + 16 * position, _MACS + 16 * (position + 1)


def region_of_a_sibling(rng: random.Random) -> bytes:
    """From another file of this store and fingerprint, half the time with all its MACs."""
    data = bytearray(SOUND)
    names = rng.sample([n for n in PLACES if n not in ("length", "macs")], rng.randrange(1, 4))
    for name in names:
        for first, last in PLACES[name]:
            data[first:last] = SIBLING[first:last]
    if rng.random() < 0.5:
        first, last = PLACES["macs"][0]
        data[first:last] = SIBLING[first:last]
    return bytes(data)


def stranger(rng: random.Random) -> bytes:
    return rng.choice(STRANGERS)


def header_length(rng: random.Random) -> bytes:
    lengths = (0, 1, 2**20, 2**20 + 1, 2**63, 2**64 - 1, rng.randrange(2**64), len(SOUND))
    rest = rng.choice((SOUND[8:], bytes(rng.randrange(2000)), b"[" * 100_000, b'{"a":' * 10_000))
    return struct.pack("<Q", rng.choice((*lengths, max(0, len(rest) - 16)))) + rest


_HOSTILE = (
    None, "", "0", "-1", -1, 0, 2**70, "9" * 5000, 1e999, float("nan"), [], {}, [[]], True,
    "9", "2", "\ud800", "../../x", "\0",
)  # fmt: skip


def edited_json(rng: random.Random) -> bytes:
    """A value of the table or the metadata replaced, and a MAC made without the secret."""
    table = json.loads(SOUND[8:_HEADER])
    inside = rng.choice([table, table["__metadata__"], *list(table.values())[1:]])
    name = rng.choice([*inside, "more"])
    inside[name] = rng.choice(_HOSTILE)
    if rng.random() < 0.2:
        del inside[name]
    return _forged(json.dumps(table).encode(), SOUND[_HEADER:], rng)


def forged(rng: random.Random) -> bytes:
    """Other entries and ids, with MACs as they are made without the secret."""
    data = bytearray(SOUND[_HEADER:])
    for name in rng.sample(["token_ids", "text", "key_range", "entries"], 2):
        for first, last in PLACES[name]:
            data[first - _HEADER : last - _HEADER] = rng.randbytes(last - first)
    return _forged(SOUND[8:_HEADER], bytes(data), rng)


def _forged(text: bytes, data: bytes, rng: random.Random) -> bytes:
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    regions = [header] + [
        data[first - _HEADER : last - _HEADER]
        for name, places in PLACES.items()
        if name not in ("length", "json", "macs")
        for first, last in places
    ]
    start = _HEADER + _LAYOUT.tensors["entries"].start
    regions += [
        data[at - _HEADER : at - _HEADER + _LAYOUT.layer_bytes]
        for at in range(start, start + SMALL.n_layers * _LAYOUT.layer_bytes, _LAYOUT.layer_bytes)
    ]
    secret = rng.choice((b"", bytes(32), rng.randbytes(32)))
    key = hashlib.blake2b(header, key=secret, digest_size=32, person=b"samkv file").digest()
    macs = [
        blake3(i.to_bytes(8, "little") + region, key=key).digest(length=16)
        for i, region in enumerate(regions)
    ]
    if rng.random() < 0.3:  # as format version 3 had them
        macs = [struct.pack("<I", zlib.crc32(region)) * 4 for region in regions]
    return header + b"".join(macs) + data[16 * len(macs) :]


CONTENTS: tuple[Bytes, ...] = (
    flipped, flipped, flipped, overwritten, cut, extended, shifted, regions_swapped,
    region_of_a_sibling, stranger, header_length, edited_json, edited_json, forged,
)  # fmt: skip


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _full_folder(path: Path) -> None:
    path.mkdir()
    (path / "file").write_bytes(SOUND)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end, tempfile.TemporaryDirectory() as short:
        end.bind(f"{short}/s")  # a socket's path is short
        os.rename(f"{short}/s", path)


def _link_to(target: str | os.PathLike[str]) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def _link_to_sound(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    elsewhere.write_bytes(SOUND)
    path.symlink_to(elsewhere)


def _unreadable(path: Path) -> None:
    path.write_bytes(SOUND)
    path.chmod(0)


def _sparse(path: Path) -> None:
    path.write_bytes(SOUND)
    os.truncate(path, 2**40)


@dataclass(frozen=True)
class Obstacle:
    """What is no file of ours, and the reasons for which it may be a miss."""

    make: Callable[[Path], None]
    reasons: tuple[str, ...] = ("corrupt",)


OBSTACLES = {
    "folder": Obstacle(Path.mkdir),
    "full folder": Obstacle(_full_folder),
    "pipe": Obstacle(_fifo),
    "socket": Obstacle(_socket),
    "link to /dev/zero": Obstacle(_link_to("/dev/zero")),
    "link to a folder": Obstacle(_link_to("/")),
    "link to nothing": Obstacle(_link_to("nothing")),
    "link to itself": Obstacle(_link_to("chunk.safetensors")),
    "link to a sound file": Obstacle(_link_to_sound),
    "unreadable": Obstacle(_unreadable, ("io", "sound")),  # root reads it all the same
    "a terabyte": Obstacle(_sparse),
}


def clear(path: Path) -> None:
    """Remove whatever is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
