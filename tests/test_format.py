"""The chunk file: its bytes as docs/format.md has them, and that no damage to it goes unnoticed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from samkv_integrations.chunk import ChunkCache
from samkv_integrations.errors import CacheMiss
from samkv_integrations.format import INDEX, KINDS, FileLayout, encode
from samkv_integrations.reader import ChunkFile, StoredChunk
from tests.chunks import random_chunk, tiny_fingerprint

# As small as they get: 5 blocks, of which 1 and 2 are the middle and 4 is short.
SMALL = tiny_fingerprint(n_heads=2, n_kv_heads=1, head_dim=4, block_size=2)
N_TOKENS = 9


def pack(tensor: Tensor, code: str) -> bytes:
    """The numbers of a tensor, one after the other."""
    numbers = tensor.flatten().tolist()
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
    in_middle = [token for block in middle for token in range(*spans[block])]
    anchors = [token for token in range(n_tokens) if token not in in_middle]

    name, code = {
        "float32": ("F32", "f"),
        "float16": ("F16", "e"),
        "bfloat16": ("BF16", "bfloat16"),
    }[fields["dtype"]]
    bits = n_tokens, groups, dim * fields["code_bits"] // 8
    rows = groups, dim
    table = [
        ("token_ids", "I32", [n_tokens], pack(chunk.token_ids, "i")),
        ("block_max", "I32", [n_layers], pack(chunk.statistics.block_max, "i")),
        ("block_min", "I32", [n_layers], pack(chunk.statistics.block_min, "i")),
        ("stable", "U8", [n_layers], pack(chunk.statistics.stable, "B")),
        ("outliers", "U8", [n_layers, n_tokens], pack(chunk.statistics.outliers, "B")),
        ("local_query", name, [n_layers, heads, dim], pack(chunk.local_query, code)),
        ("summary_codes", "I8", [n_layers, len(middle), *rows], pack(chunk.summaries.codes, "b")),
        ("summary_scale", "F16", [n_layers, len(middle), groups], pack(chunk.summaries.scale, "e")),
        ("key_codes", "U8", [n_layers, *bits], pack(chunk.codes.codes, "B")),
        ("key_code_scale", "F16", [n_layers, *rows], pack(chunk.codes.scale, "e")),
        ("key_code_offset", "F16", [n_layers, *rows], pack(chunk.codes.offset, "e")),
    ]
    n_checksums = 1 + len(table) + 2 * n_layers * n_blocks
    crcs = [zlib.crc32(data) for *_, data in table]
    for layer in range(n_layers):
        for first, stop in spans:
            for kind in (chunk.keys, chunk.values):
                crcs.append(zlib.crc32(pack(kind[layer, first:stop], code)))
    for part, tokens in (("anchor", anchors), ("middle", in_middle)):
        for kind, tensor in (("keys", chunk.keys), ("values", chunk.values)):
            shape = [n_layers, len(tokens), *rows]
            table.append((f"{part}_{kind}", name, shape, pack(tensor[:, tokens], code)))

    labelled = {k: v for k, v in fields.items() if k != "model"}
    digest = hashlib.blake2b(json.dumps(labelled, sort_keys=True).encode(), digest_size=16)
    compact = (",", ":")
    header: dict[str, object] = {
        "__metadata__": {
            "format_version": "1",
            "fingerprint": digest.hexdigest(),
            "fingerprint_fields": json.dumps(fields, sort_keys=True, separators=compact),
            "key": chunk.key,
            "n_tokens": str(n_tokens),
        }
    }
    start = 0
    for name, dtype, shape, data in [
        ("checksums", "U32", [n_checksums], b"1234" * n_checksums),
        *table,
    ]:
        stop = start + len(data)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=compact)
    text += " " * (-len(text) % 8)
    before = struct.pack("<Q", len(text)) + text.encode("ascii")
    crcs.insert(0, zlib.crc32(before))
    return before + struct.pack(f"<{n_checksums}I", *crcs) + b"".join(row[-1] for row in table)


def with_header(data: bytes, edit: Callable[[dict[str, object]], object]) -> bytes:
    """A file whose JSON was edited and whose header checksum is right again."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    before = struct.pack("<Q", len(text)) + text
    return before + struct.pack("<I", zlib.crc32(before)) + data[8 + length + 4 :]


def read_everything(path: Path, chunk: ChunkCache) -> None:
    with ChunkFile(path, chunk.key, chunk.fingerprint) as stored:
        stored.verify()


def reason_of(path: Path, chunk: ChunkCache) -> str:
    with pytest.raises(CacheMiss) as caught:
        read_everything(path, chunk)
    return caught.value.reason


def read_block(stored: StoredChunk, layer: int, block: int) -> tuple[Tensor, Tensor]:
    first, stop = stored.blocks.span(block)
    made_by = stored.fingerprint
    shape = (stop - first, made_by.n_kv_heads, made_by.head_dim)
    keys = torch.empty(shape, dtype=made_by.torch_dtype)
    values = torch.empty_like(keys)
    stored.read_blocks(layer, [block], keys, values)
    return keys, values


@pytest.fixture
def chunk() -> ChunkCache:
    return random_chunk(7, N_TOKENS, SMALL)


@pytest.fixture
def path(tmp_path: Path, chunk: ChunkCache) -> Path:
    path = tmp_path / "chunk.safetensors"
    path.write_bytes(b"".join(encode(chunk)))
    return path


CASES = [
    ("float32", 1, 1, 2),
    ("float32", 2, 1, 2),
    ("float32", 6, 1, 2),  # exactly the anchors: no middle
    ("float32", 7, 1, 2),
    ("float32", 9, 1, 2),
    ("float32", 17, 2, 1),
    ("float32", 17, 0, 0),  # no anchors
    ("bfloat16", 9, 1, 2),
    ("float16", 9, 0, 1),
]


@pytest.mark.parametrize(("dtype", "n_tokens", "n_init", "n_local"), CASES)
def test_bytes_are_those_of_the_specification(
    dtype: str, n_tokens: int, n_init: int, n_local: int
) -> None:
    fingerprint = replace(SMALL, dtype=dtype, n_init=n_init, n_local=n_local, model='é "x"')
    chunk = random_chunk(n_tokens, n_tokens, fingerprint)
    assert b"".join(encode(chunk)) == file_by_hand(chunk)


@pytest.mark.parametrize(("dtype", "n_tokens", "n_init", "n_local"), CASES)
def test_safetensors_reads_what_we_wrote(
    tmp_path: Path, dtype: str, n_tokens: int, n_init: int, n_local: int
) -> None:
    fingerprint = replace(SMALL, dtype=dtype, n_init=n_init, n_local=n_local)
    chunk = random_chunk(n_tokens, n_tokens, fingerprint)
    path = tmp_path / "chunk.safetensors"
    path.write_bytes(b"".join(encode(chunk)))
    blocks = chunk.blocks
    is_anchor = torch.ones(n_tokens, dtype=torch.bool)
    is_anchor[blocks.middle_start : blocks.middle_stop] = False
    expected = {
        "token_ids": chunk.token_ids,
        "block_max": chunk.statistics.block_max,
        "block_min": chunk.statistics.block_min,
        "stable": chunk.statistics.stable.to(torch.uint8),
        "outliers": chunk.statistics.outliers.to(torch.uint8),
        "local_query": chunk.local_query,
        "summary_codes": chunk.summaries.codes,
        "summary_scale": chunk.summaries.scale,
        "key_codes": chunk.codes.codes,
        "key_code_scale": chunk.codes.scale,
        "key_code_offset": chunk.codes.offset,
        "anchor_keys": chunk.keys[:, is_anchor],
        "anchor_values": chunk.values[:, is_anchor],
        "middle_keys": chunk.keys[:, ~is_anchor],
        "middle_values": chunk.values[:, ~is_anchor],
    }
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == {"checksums", *expected}
        assert file.metadata()["key"] == chunk.key
        for name, tensor in expected.items():
            found = file.get_tensor(name)
            assert found.dtype == tensor.dtype and torch.equal(found, tensor), name


def test_layout_knows_where_each_block_is(path: Path, chunk: ChunkCache) -> None:
    data = path.read_bytes()
    layout = FileLayout(fingerprint=SMALL, n_tokens=N_TOKENS)
    after_header = len(data) - layout.size
    for kind in KINDS:
        for layer in range(SMALL.n_layers):
            for block in range(chunk.blocks.n_blocks):
                start, stop = layout.block_range(layer, block, kind)
                first, last = chunk.blocks.span(block)
                rows = getattr(chunk, kind)[layer, first:last]
                assert data[after_header + start : after_header + stop] == pack(rows, "f")


def test_tensors_need_not_be_contiguous(chunk: ChunkCache) -> None:
    turned = replace(
        chunk,
        keys=chunk.keys.transpose(0, 1).contiguous().transpose(0, 1),
        values=chunk.values.clone().requires_grad_(),
    )
    assert not turned.keys.is_contiguous()
    assert b"".join(encode(turned)) == b"".join(encode(chunk))


@pytest.mark.parametrize("field", ["keys", "values", "local_query", "token_ids"])
def test_a_chunk_of_wrong_shape_or_dtype_is_not_written(chunk: ChunkCache, field: str) -> None:
    tensor = getattr(chunk, field)
    for wrong in (tensor[:-1], tensor.double()):
        with pytest.raises(AssertionError):
            list(encode(replace(chunk, **{field: wrong})))


# -- damage --------------------------------------------------------------------------------------


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


READS: dict[str, Callable[[StoredChunk], object]] = {
    "local_query": lambda stored: stored.local_query(),
    "summary": lambda stored: stored.summaries(),
    "key_code": lambda stored: stored.codes(),
}


@pytest.mark.parametrize("name", INDEX)
def test_a_read_notices_damage_to_its_own_bytes_only(
    path: Path, chunk: ChunkCache, name: str
) -> None:
    layout = FileLayout(fingerprint=SMALL, n_tokens=N_TOKENS)
    data = bytearray(path.read_bytes())
    after_header = len(data) - layout.size
    for position in (layout.tensors[name].start, layout.tensors[name].stop - 1):
        damaged = data.copy()
        damaged[after_header + position] ^= 0x10
        path.write_bytes(damaged)
        reads = [prefix for prefix in READS if name.startswith(prefix)]
        if not reads:  # token ids and statistics are checked when the file is opened
            assert reason_of(path, chunk) == "corrupt"
            continue
        with ChunkFile(path, chunk.key, SMALL) as stored:
            for prefix, read in READS.items():
                if prefix not in reads:
                    read(stored)
            for block in range(stored.blocks.n_blocks):
                read_block(stored, 0, block)
            with pytest.raises(CacheMiss, match="corrupt") as caught:
                READS[reads[0]](stored)
            assert name in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_block_spoils_no_other(path: Path, chunk: ChunkCache, kind: str) -> None:
    layout = FileLayout(fingerprint=SMALL, n_tokens=N_TOKENS)
    data = path.read_bytes()
    places = [(layer, block) for layer in range(2) for block in range(chunk.blocks.n_blocks)]
    for place in places:
        start, stop = layout.block_range(*place, kind)
        for position in (start, stop - 1):
            damaged = bytearray(data)
            damaged[len(data) - layout.size + position] ^= 0x80
            path.write_bytes(damaged)
            with ChunkFile(path, chunk.key, SMALL) as stored:
                for other in places:
                    if other != place:
                        read_block(stored, *other)
                with pytest.raises(CacheMiss, match="corrupt"):
                    read_block(stored, *place)


def test_a_file_of_any_other_length_is_corrupt(path: Path, chunk: ChunkCache) -> None:
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert reason_of(path, chunk) == "corrupt"
    path.write_bytes(data + b"\0")
    assert reason_of(path, chunk) == "corrupt"


def test_a_file_that_shrinks_while_open_is_corrupt(path: Path, chunk: ChunkCache) -> None:
    with ChunkFile(path, chunk.key, SMALL) as stored:
        os.truncate(path, path.stat().st_size - 1)
        last_middle = chunk.blocks.middle_blocks[-1]
        read_block(stored, 0, last_middle)
        with pytest.raises(CacheMiss, match="corrupt: .*too short"):
            read_block(stored, SMALL.n_layers - 1, last_middle)


def test_no_file_is_absent(tmp_path: Path, chunk: ChunkCache) -> None:
    assert reason_of(tmp_path / "none.safetensors", chunk) == "absent"
    (tmp_path / "file").touch()
    assert reason_of(tmp_path / "file" / "none.safetensors", chunk) == "absent"


def test_failures_of_the_operating_system_are_io(
    path: Path, chunk: ChunkCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reason_of(path.parent, chunk) == "io"  # a folder

    def broken_disk(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with ChunkFile(path, chunk.key, SMALL) as stored:
        monkeypatch.setattr(os, "preadv", broken_disk)
        with pytest.raises(CacheMiss, match="io: .*Input/output error"):
            read_block(stored, 0, 0)


def test_another_format_version_is_named(path: Path, chunk: ChunkCache) -> None:
    data = with_header(path.read_bytes(), lambda h: h["__metadata__"].update(format_version="2"))
    path.write_bytes(data)
    assert reason_of(path, chunk) == "format"


def test_a_file_of_another_fingerprint_or_chunk(path: Path, chunk: ChunkCache) -> None:
    assert (
        reason_of(path, replace(chunk, fingerprint=replace(SMALL, weights="w1"))) == "fingerprint"
    )
    assert reason_of(path, replace(chunk, key="0" * 32)) == "tokens"


def test_the_label_of_the_model_does_not_matter(path: Path, chunk: ChunkCache) -> None:
    read_everything(path, replace(chunk, fingerprint=replace(SMALL, model="a longer label")))


@pytest.mark.parametrize(
    "edit",
    [
        lambda h: h.update(more={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
        lambda h: h.pop("stable"),
        lambda h: h.pop("__metadata__"),
        lambda h: h.update(__metadata__=[]),
        lambda h: h["stable"].update(dtype="I8"),
        lambda h: h["middle_keys"].update(shape=h["middle_keys"]["shape"][::-1]),
        lambda h: h.update(block_max=h["block_min"], block_min=h["block_max"]),
        lambda h: h["__metadata__"].update(n_tokens="8"),
        lambda h: h["__metadata__"].update(n_tokens="0"),
        lambda h: h["__metadata__"].update(n_tokens="-9"),
        lambda h: h["__metadata__"].update(n_tokens=9),
        lambda h: h["__metadata__"].update(n_tokens=float("inf")),
        lambda h: h["__metadata__"].update(n_tokens="9" * 100),
        lambda h: h["__metadata__"].update(fingerprint_fields="{}"),
        lambda h: h["__metadata__"].update(fingerprint_fields="[1"),
        lambda h: h["__metadata__"].update(comment="x"),
    ],
)
def test_a_header_that_is_not_the_expected_one_is_corrupt(
    path: Path, chunk: ChunkCache, edit: Callable[[dict[str, object]], object]
) -> None:
    """Although its own checksum is right."""
    data = path.read_bytes()
    path.write_bytes(with_header(data, lambda header: None))
    read_everything(path, chunk)
    path.write_bytes(with_header(data, edit))
    assert reason_of(path, chunk) == "corrupt"


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<Q", 2**63) + bytes(100),
        struct.pack("<Q", 2**21) + bytes(2**21),
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        struct.pack("<Q", 4) + b"null" + bytes(100),
        struct.pack("<Q", 0) + bytes(100),
    ],
)
def test_a_hostile_header_is_corrupt(path: Path, chunk: ChunkCache, data: bytes) -> None:
    path.write_bytes(data)
    assert reason_of(path, chunk) == "corrupt"


# -- which bytes are read ------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Offset and length of every read that is issued."""
    seen: list[tuple[int, int]] = []
    preadv, pread = os.preadv, os.pread

    def spy_preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        seen.append((offset, sum(len(buffer) for buffer in buffers)))
        return preadv(fd, buffers, offset)

    def spy_pread(fd: int, length: int, offset: int) -> bytes:
        seen.append((offset, length))
        return pread(fd, length, offset)

    monkeypatch.setattr(os, "preadv", spy_preadv)
    monkeypatch.setattr(os, "pread", spy_pread)
    return seen


def test_exactly_the_bytes_of_the_blocks_are_read(
    tmp_path: Path, reads: list[tuple[int, int]]
) -> None:
    fingerprint = tiny_fingerprint(dtype="bfloat16", n_layers=3, block_size=4)
    chunk = random_chunk(3, 38, fingerprint)  # blocks 0 | 1 to 7 | 8 and 9, the last of 2 tokens
    path = tmp_path / "chunk.safetensors"
    data = b"".join(encode(chunk))
    path.write_bytes(data)
    row = 2 * 8 * 2
    n_middle, n_anchor, layer = 28 * row, 10 * row, 1
    middle_values = len(data) - 3 * n_middle + layer * n_middle
    middle_keys = middle_values - 3 * n_middle
    anchor_values = len(data) - 6 * n_middle - 3 * n_anchor + layer * n_anchor
    anchor_keys = anchor_values - 3 * n_anchor

    def middle(first: int, n_blocks: int) -> list[tuple[int, int]]:
        """The middle blocks from the first + 1st on."""
        return [
            (start + first * 4 * row, n_blocks * 4 * row) for start in (middle_keys, middle_values)
        ]

    expected = {
        (3,): middle(2, 1),
        (1, 2, 3): middle(0, 3),
        (1, 4, 5): [middle(0, 1)[0], middle(3, 2)[0], middle(0, 1)[1], middle(3, 2)[1]],
        (0,): [(anchor_keys, 4 * row), (anchor_values, 4 * row)],
        (9,): [(anchor_keys + 8 * row, 2 * row), (anchor_values + 8 * row, 2 * row)],
        (0, 8, 9): [(anchor_keys, n_anchor), (anchor_values, n_anchor)],
        (0, 1): [
            (anchor_keys, 4 * row),
            middle(0, 1)[0],
            (anchor_values, 4 * row),
            middle(0, 1)[1],
        ],
        (): [],
    }
    with ChunkFile(path, chunk.key, fingerprint) as stored:
        for blocks, ranges in expected.items():
            tokens = [token for block in blocks for token in range(*chunk.blocks.span(block))]
            keys = torch.empty(len(tokens), 2, 8, dtype=torch.bfloat16)
            values = torch.empty_like(keys)
            reads.clear()
            before = stored.bytes_read
            stored.read_blocks(layer, blocks, keys, values)
            assert reads == ranges, blocks
            assert stored.bytes_read - before == sum(length for _, length in ranges)
            assert torch.equal(keys, chunk.keys[layer, tokens])
            assert torch.equal(values, chunk.values[layer, tokens])


def test_opening_reads_the_small_part_and_each_index_part_is_one_read(
    path: Path, chunk: ChunkCache, reads: list[tuple[int, int]]
) -> None:
    layout = FileLayout(fingerprint=SMALL, n_tokens=N_TOKENS)
    header = path.stat().st_size - layout.size
    places = layout.tensors
    with ChunkFile(path, chunk.key, SMALL) as stored:
        stored.statistics()
        assert sum(length for _, length in reads) == header + places["outliers"].stop
        for read, first, last in (
            (stored.local_query, "local_query", "local_query"),
            (stored.summaries, "summary_codes", "summary_scale"),
            (stored.codes, "key_codes", "key_code_offset"),
        ):
            reads.clear()
            read()
            read()
            start, stop = places[first].start, places[last].stop
            assert reads == [(header + start, stop - start)]
        assert stored.bytes_read == header + places["key_code_offset"].stop
        reads.clear()
        stored.verify()
        assert sum(length for _, length in reads) == layout.size - places["checksums"].stop
