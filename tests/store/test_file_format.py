"""The chunk file: its bytes as docs/format.md has them, and that no damage to it goes unnoticed."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor

from samkv_integrations.errors import CacheMiss
from samkv_integrations.runtimes.transformers.entries import cache_arrays
from samkv_integrations.store.base import StoredChunk
from samkv_integrations.store.chunk import ArrayKind, BlockScheme, CacheArray, ChunkCache
from samkv_integrations.store.chunk_file import FileLayout
from tests.support.chunk_files import NAMESPACE, SECRET, encoded, open_file, read_all
from tests.support.chunks import TINY, random_chunk

# As small as they get: 5 blocks, of which 1 and 2 are the middle and 4 is short.
SMALL = replace(TINY, n_heads=2, n_kv_heads=1, head_dim=4, block_size=2)
N_TOKENS = 9


def pack(numbers: Tensor | NDArray[Any], code: str) -> bytes:
    """The numbers of an array, one after the other."""
    numbers = numbers.reshape(-1).tolist()
    if code == "bfloat16":  # the upper half of a float32
        return b"".join(struct.pack("<f", number)[2:] for number in numbers)
    return struct.pack(f"<{len(numbers)}{code}", *numbers)


def file_by_hand(chunk: ChunkCache) -> bytes:
    """The file of ``chunk`` after docs/format.md, with nothing from the package."""
    fields = {name: getattr(chunk.fingerprint, name) for name in chunk.fingerprint.__annotations__}
    n_layers, n_tokens = fields["n_layers"], len(chunk.token_ids)
    size, n_init, n_local = fields["block_size"], fields["n_init"], fields["n_local"]
    heads, groups, dim = fields["n_heads"], fields["n_kv_heads"], fields["head_dim"]
    spans = [(i, min(i + size, n_tokens)) for i in range(0, n_tokens, size)]
    n_blocks = len(spans)
    middle = list(range(n_init, n_blocks - n_local)) if n_blocks > n_init + n_local else []

    name, code = {
        "float32": ("F32", "f"),
        "float16": ("F16", "e"),
        "bfloat16": ("BF16", "bfloat16"),
    }[fields["dtype"]]
    bits = fields["store_bits"]
    if bits == 16:
        entry_bytes = 2 * groups * dim * {"F32": 4, "F16": 2, "BF16": 2}[name]
    else:  # codes of keys and values, then scale and offset of each head's values
        entry_bytes = 2 * groups * dim * bits // 8 + 2 * groups * 2
    rows = groups, dim
    text = chunk.text.encode("utf-8", "surrogatepass")
    about, means = cache_arrays.statistics(chunk), cache_arrays.block_means(chunk)
    query, ranges = cache_arrays.local_query(chunk), cache_arrays.key_range(chunk)
    n_ranges = math.ceil(n_tokens / 64) if bits < 16 else 0
    entries = n_layers, n_tokens, entry_bytes
    table = [
        ("token_ids", "I32", [n_tokens], pack(chunk.token_ids, "i")),
        ("block_max", "I32", [n_layers], pack(about.block_max, "i")),
        ("block_min", "I32", [n_layers], pack(about.block_min, "i")),
        ("stable", "U8", [n_layers], pack(about.stable, "B")),
        ("outliers", "U8", [n_layers, n_tokens], pack(about.outliers, "B")),
        ("text", "U8", [len(text)], text),
        ("local_query", name, [n_layers, heads, dim], pack(query, code)),
        ("summary_codes", "I8", [n_layers, len(middle), *rows], pack(means.codes, "b")),
        (
            "summary_scale",
            "F16",
            [n_layers, len(middle), groups],
            pack(means.scale, "e"),
        ),
        ("key_range", "F16", [n_layers, n_ranges, 2, *rows], pack(ranges, "e")),
    ]
    regions = [data for *_, data in table]
    for layer in range(n_layers):
        for first, stop in spans:
            regions.append(pack(chunk.entries[layer, first:stop], "B"))
    regions += [pack(of_layer, "B") for of_layer in chunk.entries]
    n_macs = 1 + len(regions)
    assert n_macs == 1 + len(table) + n_layers * n_blocks + n_layers
    table.append(("entries", "U8", list(entries), pack(chunk.entries, "B")))

    labelled = {k: v for k, v in fields.items() if k != "model"}
    digest = hashlib.blake2b(json.dumps(labelled, sort_keys=True).encode(), digest_size=16)
    compact = (",", ":")
    header: dict[str, object] = {
        "__metadata__": {
            "format_version": "5",
            "fingerprint": digest.hexdigest(),
            "fingerprint_fields": json.dumps(fields, sort_keys=True, separators=compact),
            "key": chunk.key,
            "namespace": NAMESPACE,
            "n_tokens": str(n_tokens),
            "n_text": str(len(text)),
        }
    }
    start = 0
    for name, dtype, shape, data in [
        ("macs", "U8", [n_macs, 16], bytes(16 * n_macs)),
        *table,
    ]:
        stop = start + len(data)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
        start = stop
    before = before_tensors(header)
    regions.insert(0, before)
    macs = [mac_by_hand(before, i, data) for i, data in enumerate(regions)]
    return before + b"".join(macs) + b"".join(row[-1] for row in table)


def before_tensors(header: dict[str, object]) -> bytes:
    text = json.dumps(header, separators=(",", ":"))
    text += " " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text.encode("ascii")


def mac_by_hand(before: bytes, position: int, data: bytes) -> bytes:
    key = hashlib.blake2b(before, key=SECRET, digest_size=32, person=b"samkv file").digest()
    return blake3(struct.pack("<Q", position) + data, key=key).digest(length=16)


def with_header(data: bytes, edit: Callable[[dict[str, Any]], object]) -> bytes:
    """A file whose JSON was edited by who knows the secret: its header's MAC is right again."""
    length = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    edit(header)
    before = before_tensors(header)
    return before + mac_by_hand(before, 0, before) + data[8 + length + 16 :]


def read_everything(path: Path, chunk: ChunkCache) -> None:
    with open_file(path, chunk) as stored:
        stored.verify()


def reason_of(path: Path, chunk: ChunkCache) -> str:
    with pytest.raises(CacheMiss) as caught:
        read_everything(path, chunk)
    return caught.value.reason


def read_block(stored: StoredChunk, layer: int, block: int) -> NDArray[np.uint8]:
    first, stop = stored.blocks.span(block)
    n_bytes = cache_arrays.entry_format_of(stored.fingerprint).n_bytes
    entries = np.empty((stop - first, n_bytes), np.uint8)
    stored.read_blocks(layer, [block], entries)
    return entries


@pytest.fixture
def chunk() -> ChunkCache:
    return random_chunk(7, N_TOKENS, SMALL)


@pytest.fixture
def path(tmp_path: Path, chunk: ChunkCache) -> Path:
    path = tmp_path / "chunk.safetensors"
    path.write_bytes(encoded(chunk))
    return path


CASES = [
    # dtype, bits, tokens, n_init, n_local
    ("float32", 4, 1, 1, 2),
    ("float32", 8, 2, 1, 2),
    ("float32", 16, 6, 1, 2),  # no middle
    ("float32", 4, 7, 1, 2),
    ("float32", 16, 9, 1, 2),
    ("float32", 8, 17, 2, 1),
    ("float32", 4, 17, 0, 0),  # no anchors
    ("bfloat16", 4, 9, 1, 2),
    ("bfloat16", 16, 9, 1, 2),
    ("float16", 8, 9, 0, 1),
    ("float16", 16, 9, 0, 1),
]


def case(dtype: str, bits: int, n_tokens: int, n_init: int, n_local: int) -> ChunkCache:
    fingerprint = replace(SMALL, dtype=dtype, store_bits=bits, n_init=n_init, n_local=n_local)
    return random_chunk(n_tokens, n_tokens, replace(fingerprint, model='é "x"'))


@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_bytes_are_those_of_the_specification(sizes: tuple[str, int, int, int, int]) -> None:
    chunk = case(*sizes)
    assert encoded(chunk) == file_by_hand(chunk)


def test_a_chunk_in_four_bits_takes_less_than_a_third_of_its_entries_in_bfloat16() -> None:
    """Everything counted: text, statistics, block means, MACs, header. Of Qwen2.5-0.5B's shape."""
    sizes = {}
    for bits in (4, 8, 16):
        fingerprint = replace(
            SMALL, dtype="bfloat16", n_layers=24, n_heads=14, n_kv_heads=2, head_dim=64,
            block_size=BlockScheme.auto(512).size, store_bits=bits,
        )  # fmt: skip
        shape = cache_arrays.cache_shape(fingerprint, 512)
        layout = FileLayout.of(fingerprint, 512, "", 2200 * "x", shape)
        sizes[bits] = layout.file_size("0" * 32)
    entries = 24 * 512 * 2 * 2 * 64 * 2
    assert sizes[4] <= 0.32 * entries
    assert sizes[8] <= 0.57 * entries
    assert entries < sizes[16] <= 1.03 * entries


def test_entries_need_not_be_contiguous(chunk: ChunkCache) -> None:
    turned = replace(chunk, entries=chunk.entries.swapaxes(0, 1).copy().swapaxes(0, 1))
    assert not turned.entries.flags.c_contiguous
    assert encoded(turned) == encoded(chunk)


def test_every_flipped_byte_is_noticed(path: Path, chunk: ChunkCache) -> None:
    read_everything(path, chunk)
    data = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for offset, byte in enumerate(data):
            for flipped in (byte ^ 1 << offset % 8, byte ^ 0xFF):
                os.pwrite(file.fileno(), bytes([flipped]), offset)
                with pytest.raises(CacheMiss):
                    read_everything(path, chunk)
            os.pwrite(file.fileno(), bytes([byte]), offset)
    read_everything(path, chunk)


def test_a_file_of_any_other_length_is_corrupt(path: Path, chunk: ChunkCache) -> None:
    data = path.read_bytes()
    for length in (*range(0, len(data), 11), len(data) - 1):
        path.write_bytes(data[:length])
        assert reason_of(path, chunk) == "corrupt"
    path.write_bytes(data + b"\0")
    assert reason_of(path, chunk) == "corrupt"


def test_a_file_that_shrinks_while_open_is_corrupt(path: Path, chunk: ChunkCache) -> None:
    with open_file(path, chunk) as stored:
        os.truncate(path, path.stat().st_size - 1)
        last_middle = chunk.blocks.middle_blocks[-1]
        read_block(stored, 0, last_middle)
        with pytest.raises(CacheMiss, match="corrupt: .*too short"):
            read_block(stored, SMALL.n_layers - 1, chunk.blocks.n_blocks - 1)
        with pytest.raises(CacheMiss, match="corrupt: .*too short"):
            read_all(stored)


def test_no_file_is_absent(tmp_path: Path, chunk: ChunkCache) -> None:
    assert reason_of(tmp_path / "none.safetensors", chunk) == "absent"
    (tmp_path / "file").touch()
    assert reason_of(tmp_path / "file" / "none.safetensors", chunk) == "absent"


def test_failures_of_the_operating_system_are_io(
    path: Path, chunk: ChunkCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_disk(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with open_file(path, chunk) as stored:
        monkeypatch.setattr(os, "preadv", broken_disk)
        with pytest.raises(CacheMiss, match="io: .*Input/output error"):
            read_block(stored, 0, 0)
        with pytest.raises(CacheMiss, match="io: .*Input/output error"):
            read_all(stored)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EACCES, errno.ESTALE])
def test_a_file_that_cannot_be_opened_is_io(
    path: Path, chunk: ChunkCache, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Too many open files say nothing about this one."""

    def refuses(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuses)
    with pytest.raises(CacheMiss, match=f"io: .*{os.strerror(number)}"):
        open_file(path, chunk)


@pytest.mark.parametrize("version", ["1", "2", "3", "4", "6", "", "5.0"])
def test_another_format_version_is_named(path: Path, chunk: ChunkCache, version: str) -> None:
    data = path.read_bytes()
    path.write_bytes(with_header(data, lambda h: h["__metadata__"].update(format_version=version)))
    assert reason_of(path, chunk) == "format"


def test_a_runtime_may_have_other_arrays_or_none(tmp_path: Path, chunk: ChunkCache) -> None:
    state = CacheArray(kind=ArrayKind("F64", (3, 2)), data=np.arange(48, dtype=np.uint8))
    nothing = CacheArray(kind=ArrayKind("BF16", (0,)), data=np.empty(0, np.uint8))
    path = tmp_path / "chunk.safetensors"
    for first, later in (({}, {}), ({"state": state}, {"nothing": nothing}), ({}, {"a": state})):
        other = replace(chunk, at_opening=first, on_demand=later)
        path.write_bytes(encoded(other))
        with open_file(path, other) as stored:
            stored.verify()
            found = stored.chunk()
        assert found.shape == other.shape and np.array_equal(found.entries, other.entries)
        for name, array in {**first, **later}.items():
            assert np.array_equal(found.array(name).data, array.data)


def swapped(header: dict[str, Any]) -> None:
    header["macs"] = header.pop("macs")


def moved(header: dict[str, Any]) -> None:
    for place in header.values():
        if "data_offsets" in place:
            place["data_offsets"] = [at + 1 for at in place["data_offsets"]]


@pytest.mark.parametrize(
    "edit",
    [
        swapped,
        moved,
        lambda header: header.pop("text"),
        lambda header: header.pop("entries"),
        lambda header: header.pop("stable"),  # leaves a hole
        lambda header: header["stable"].update(dtype="U7"),
        lambda header: header["stable"].update(dtype="I32"),
        lambda header: header["stable"].update(shape=[-1, -2]),
        lambda header: header["stable"].update(shape=[[2]]),
        lambda header: header["entries"].update(shape=header["entries"]["shape"][::-1]),
        lambda header: header["entries"].update(shape=[1]),
        lambda header: header["__metadata__"].update(n_tokens=str(N_TOKENS - 1)),
        lambda header: header["__metadata__"].update(n_text="5"),
        lambda header: header["__metadata__"].pop("fingerprint_fields"),
    ],
)
def test_a_table_that_does_not_fit_is_corrupt(
    path: Path, chunk: ChunkCache, edit: Callable[[dict[str, Any]], object]
) -> None:
    """Although the MAC of the header is right."""
    path.write_bytes(with_header(path.read_bytes(), edit))
    with pytest.raises(CacheMiss, match=r"corrupt: .*: header \("):
        read_everything(path, chunk)


def test_a_file_of_another_fingerprint_or_chunk(path: Path, chunk: ChunkCache) -> None:
    assert (
        reason_of(path, replace(chunk, fingerprint=replace(SMALL, weights="w1"))) == "fingerprint"
    )
    assert reason_of(path, replace(chunk, key="0" * 32)) == "fingerprint"


def test_a_file_of_another_namespace_or_store(path: Path, chunk: ChunkCache) -> None:
    """Even under the same key."""
    for others in ({"namespace": "another"}, {"secret": bytes(32)}):
        path.write_bytes(encoded(chunk, **others))
        assert reason_of(path, chunk) == "corrupt"


def test_a_forged_file_is_corrupt(path: Path, chunk: ChunkCache) -> None:
    """Other entries with MACs that are right but for the secret, and those of the true file."""
    forged = replace(chunk, entries=chunk.entries ^ 1)
    sound, own = path.read_bytes(), encoded(forged, secret=os.urandom(32))
    start = len(sound) - layout_of(chunk).size
    for data in (own, own[:start] + sound[start : start + 16] + own[start + 16 :]):
        path.write_bytes(data)
        assert reason_of(path, chunk) == "corrupt"


def layout_of(chunk: ChunkCache) -> FileLayout:
    return FileLayout.of_cache(chunk, NAMESPACE)


def block_range(layout: FileLayout, layer: int, block: int) -> tuple[int, int]:
    """First byte, and the one after the last, of one block's entries at one layer."""
    first, n_bytes = layout.block_places[block]
    start = layout.arrays["entries"].start + layer * layout.layer_bytes + first
    return start, start + n_bytes


def test_a_region_is_sound_in_its_own_place_only(path: Path, chunk: ChunkCache) -> None:
    """Two blocks exchanged with their MACs, and one of another chunk of the store with its own."""
    layout = layout_of(chunk)
    sound = path.read_bytes()
    other = encoded(random_chunk(8, N_TOKENS, SMALL))
    assert len(other) == len(sound)
    start = len(sound) - layout.size
    blocks = [slice(*(start + at for at in block_range(layout, 1, block))) for block in (1, 2)]
    first = start + 16 * (11 + chunk.blocks.n_blocks + 1)
    macs = [slice(first, first + 16), slice(first + 16, first + 32)]
    exchanged, moved = bytearray(sound), bytearray(sound)
    for one, two in (blocks, macs):
        exchanged[one], exchanged[two] = sound[two], sound[one]
        moved[one] = other[one]
    for data in (exchanged, moved):
        path.write_bytes(data)
        with open_file(path, chunk) as stored:
            read_block(stored, 1, 0)
            with pytest.raises(CacheMiss, match="corrupt"):
                read_block(stored, 1, 1)


@pytest.mark.parametrize("most", [1, 7, 100, 10_000])
def test_a_read_that_is_cut_short_goes_on(
    path: Path, chunk: ChunkCache, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """As the system cuts one of more than 2 GiB."""
    preadv = os.preadv

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(fd, [buffers[0][:most]], offset)

    monkeypatch.setattr(os, "preadv", short)
    places = layout_of(chunk).arrays
    with open_file(path, chunk) as stored:
        assert np.array_equal(read_all(stored), chunk.entries)
        assert stored.array("key_range").data.tobytes() == chunk.array("key_range").data.tobytes()
        assert stored.bytes_read == path.stat().st_size - sum(
            places[name].stop - places[name].start
            for name in ("text", "local_query", "summary_codes", "summary_scale")
        )
        stored.verify()


def test_more_layers_than_one_read_takes(tmp_path: Path) -> None:
    fingerprint = replace(SMALL, n_layers=1500, n_heads=1, head_dim=2, n_init=0, n_local=0)
    chunk = random_chunk(1, 3, fingerprint)
    path = tmp_path / "chunk.safetensors"
    path.write_bytes(encoded(chunk))
    with open_file(path, chunk) as stored:
        assert np.array_equal(read_all(stored), chunk.entries)
        stored.verify()
