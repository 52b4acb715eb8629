"""Archives: what goes in comes out under the keys of another store, and nothing else gets in."""

from __future__ import annotations

import json
import os
import random
import stat
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from samkv_integrations import ChunkStore, MemoryStore
from samkv_integrations.cache.archive import ImportResult, export_caches, import_caches
from samkv_integrations.cache.base import Store
from samkv_integrations.cache.chunk import ChunkCache, Fingerprint, chunk_key, digest_of
from samkv_integrations.cache.file_format import encode, file_key, mac
from samkv_integrations.errors import EmptyInput, FingerprintMismatch, InvalidOption, StoreError
from tests.contracts.store_contract import TINY, chunk_for

OTHER = replace(TINY, weights="w1")
SECRET = bytes(range(32))


def fill(store: Store, n: int = 4, fingerprint: Fingerprint = TINY) -> list[ChunkCache]:
    chunks = [chunk_for(store, seed, 20 + seed, fingerprint) for seed in range(n)]
    for chunk in chunks:
        store.put(chunk)
    return chunks


def found(result: ImportResult) -> tuple[int, ...]:
    """new, known, other, damaged."""
    return result.n_chunks, result.n_known, result.n_other, result.n_damaged


@pytest.fixture
def store(tmp_path: Path) -> ChunkStore:
    return ChunkStore(tmp_path / "there", namespace="tenant")


@pytest.fixture
def here(tmp_path: Path) -> ChunkStore:
    return ChunkStore(tmp_path / "here")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "caches.tar"


class TestRoundTrip:
    @pytest.mark.parametrize("kind", ["disk", "memory"])
    def test_every_tensor_and_text(self, tmp_path: Path, file: Path, kind: str) -> None:
        make: Callable[[str], Store] = (
            (lambda name: ChunkStore(tmp_path / name, namespace=name))
            if kind == "disk"
            else (lambda name: MemoryStore(namespace=name))
        )
        there, mine = make("there"), make("here")
        chunks = fill(there) + fill(there, 2, OTHER)
        seen: list[tuple[int, int]] = []
        done = export_caches(there, file, progress=lambda *at: seen.append(at))
        assert (done.n_chunks, done.n_left_out, done.bytes_written) == (6, 0, file.stat().st_size)
        assert seen == [(n, 6) for n in range(1, 7)]
        read: list[tuple[int, int]] = []
        result = import_caches(mine, file, progress=lambda *at: read.append(at))
        assert found(result) == (6, 0, 0, 0)
        assert read[-1] == (file.stat().st_size,) * 2 and read == sorted(read)
        for chunk in chunks:
            ids = chunk.token_ids.tolist()
            key = mine.key(chunk.fingerprint, ids)
            assert key != chunk.key and mine.text(key) == chunk.text
            with mine.open(key, chunk.fingerprint, ids) as opened:
                again = opened.chunk()
            assert torch.equal(again.entries, chunk.entries)
            assert torch.equal(again.local_query, chunk.local_query)
            assert again.text == chunk.text
        assert found(import_caches(mine, file)) == (0, 6, 0, 0)

    def test_some_keys_only(self, store: ChunkStore, here: ChunkStore, file: Path) -> None:
        chunks = fill(store)
        wanted = {chunks[1].key, chunks[3].key, "f" * 32}
        assert export_caches(store, file, wanted).n_chunks == 2
        assert found(import_caches(here, file)) == (2, 0, 0, 0)
        with pytest.raises(EmptyInput, match="of the 1 that were asked for"):
            export_caches(store, file.with_name("none.tar"), {"f" * 32})
        with pytest.raises(EmptyInput, match="namespace ''"):
            export_caches(here.__class__(here.path.with_name("new")), file.with_name("none.tar"))
        assert not file.with_name("none.tar").exists()

    def test_nothing_of_other_namespaces_is_in_it(self, store: ChunkStore, file: Path) -> None:
        theirs = ChunkStore(store.path, namespace="another")
        fill(store, 1)
        theirs.put(replace(chunk_for(theirs, 7), text="Nobody else's business, this."))
        export_caches(store, file)
        content = file.read_bytes()
        assert b"Chunk 0" in content
        for hidden in (b"Nobody else", b"tenant", b"another", store.secret):
            assert hidden not in content

    def test_a_cache_that_is_here_stays(
        self, store: ChunkStore, here: ChunkStore, file: Path
    ) -> None:
        (theirs,) = fill(store, 1)
        mine = replace(theirs, key=here.key(TINY, theirs.token_ids.tolist()))
        here.put(replace(mine, entries=torch.zeros_like(mine.entries)))
        export_caches(store, file)
        assert found(import_caches(here, file)) == (0, 1, 0, 0)
        with here.open(mine.key, TINY) as opened:
            assert not opened.chunk().entries.any()

    def test_a_damaged_cache_is_left_out(self, store: ChunkStore, file: Path) -> None:
        first, *_ = fill(store)
        path = store.file(first.key, TINY.digest)
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        done = export_caches(store, file)
        assert (done.n_chunks, done.n_left_out) == (3, 1)

    def test_it_is_a_tar_file_for_its_owner_alone(self, store: ChunkStore, file: Path) -> None:
        fill(store, 2)
        before = os.umask(0)
        try:
            export_caches(store, file)
        finally:
            os.umask(before)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        with tarfile.open(file, "r:") as opened:
            assert opened.getnames()[:2] == ["archive.json", "secret"]
            assert len(opened.getnames()) == 4
        assert [each.name for each in file.parent.iterdir() if each.suffix == ".tmp"] == []

    def test_an_existing_file_stays(self, store: ChunkStore, file: Path) -> None:
        fill(store, 1)
        file.write_text("precious")
        with pytest.raises(InvalidOption, match="exists; name a new file"):
            export_caches(store, file)
        assert file.read_text() == "precious"

    def test_a_folder_that_is_not_there(self, store: ChunkStore, file: Path) -> None:
        fill(store, 1)
        with pytest.raises(StoreError, match="cannot write .*No such file"):
            export_caches(store, file / "a.tar")

    def test_a_budget_holds(self, store: ChunkStore, here: ChunkStore, file: Path) -> None:
        chunks = fill(store)
        here.set_budget(max_bytes=store.stats().bytes // 2)
        export_caches(store, file)
        assert import_caches(here, file).n_chunks == len(chunks)
        assert 0 < here.stats().bytes <= store.stats().bytes // 2


class TestModels:
    def test_another_model_is_refused_if_one_is_named(
        self, store: ChunkStore, here: ChunkStore, file: Path
    ) -> None:
        fill(store)
        export_caches(store, file)
        with pytest.raises(FingerprintMismatch, match="weights is 'w1' here and 'w0' there"):
            import_caches(here, file, fingerprint=OTHER)
        assert here.keys() == []

    def test_what_is_of_other_models_is_left_out(
        self, store: ChunkStore, here: ChunkStore, file: Path
    ) -> None:
        fill(store, 3)
        fill(store, 2, OTHER)
        export_caches(store, file)
        guess = replace(
            OTHER, block_size=64
        )  # an engine knows no block size before its first chunk
        assert found(import_caches(here, file, fingerprint=guess)) == (2, 0, 3, 0)
        assert here.fingerprints() == [OTHER]

    def test_two_block_sizes_of_one_model_are_refused(
        self, store: ChunkStore, here: ChunkStore, file: Path
    ) -> None:
        """An engine goes by one of them, so the caches of the other would be as good as lost."""
        fill(here, 1, replace(TINY, block_size=8))
        fill(store)
        export_caches(store, file)
        with pytest.raises(StoreError, match="block size 4, and those here have 8"):
            import_caches(here, file)
        assert len(here.keys()) == 1

    def test_an_empty_store_takes_the_block_size(
        self, store: ChunkStore, here: ChunkStore, file: Path
    ) -> None:
        fill(store)
        export_caches(store, file)
        import_caches(here, file)
        assert here.agree_block_size(replace(TINY, block_size=64), 64) == TINY.block_size


def member(name: str, data: bytes = b"", **more: object) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in more.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


def beginning(**more: object) -> bytes:
    described = {"samkv_archive": 1, "format_version": TINY.format_version, "fingerprints": []}
    text = json.dumps({**described, **more}).encode()
    return member("archive.json", text) + member("secret", SECRET)


def chunk_member(fingerprint: Fingerprint = TINY, **change: object) -> bytes:
    store = MemoryStore()
    chunk = chunk_for(store, 3, 30, fingerprint)
    key = chunk_key(SECRET, "", fingerprint.digest, chunk.token_ids.tolist())
    data = b"".join(encode(replace(chunk, key=key, **change), "", SECRET))
    return member(f"{fingerprint.digest}/{key[:2]}/{key}.safetensors", data)


def signed(change: dict[str, object]) -> bytes:
    """The member of a chunk whose fingerprint has other fields, with right MACs."""
    data = chunk_member()[512:]
    start = 8 + int.from_bytes(data[:8], "little")
    table = json.loads(data[8:start])
    said, fields = table["__metadata__"], {**asdict(TINY), **change}
    first, last = table["token_ids"]["data_offsets"]
    ids = torch.frombuffer(bytearray(data[start + first : start + last]), dtype=torch.int32)
    digest = digest_of(fields)
    said["fingerprint_fields"] = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    said["fingerprint"], said["key"] = digest, chunk_key(SECRET, "", digest, ids.tolist())
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    stop = start + table["entries"]["data_offsets"][1]
    blocks = TINY.scheme.of(len(ids))
    size = TINY.entry_format.n_bytes
    regions = [header]
    for name in ("token_ids", "block_max", "block_min", "stable", "outliers", "text",
                 "local_query", "summary_codes", "summary_scale", "key_range"):  # fmt: skip
        regions.append(data[slice(*(start + at for at in table[name]["data_offsets"]))])
    entries = start + table["entries"]["data_offsets"][0]
    for layer in range(TINY.n_layers):
        for span in map(blocks.span, range(blocks.n_blocks)):
            base = entries + layer * len(ids) * size
            regions.append(data[base + span[0] * size : base + span[1] * size])
    key = file_key(header, SECRET)
    macs = b"".join(mac(key, place, region) for place, region in enumerate(regions))
    assert len(macs) == first
    return member(NAME, header + macs + data[start + first : stop])


END = bytes(1024)
NAME = f"{'0' * 32}/00/{'0' * 32}.safetensors"


class TestStrangers:
    """Files that somebody made up."""

    def test_what_is_made_by_hand_here_is_an_archive(self, here: ChunkStore, file: Path) -> None:
        file.write_bytes(beginning() + chunk_member() + END)
        assert found(import_caches(here, file)) == (1, 0, 0, 0)

    @pytest.mark.parametrize(
        "rest",
        [
            member("../../evil", b"x"),
            member("/tmp/evil", b"x"),
            member(NAME.replace("safetensors", "py"), b"x"),
            member(NAME, type=tarfile.SYMTYPE, linkname="/etc/passwd"),
            member(NAME, type=tarfile.LNKTYPE, linkname="secret"),
            member(NAME, type=tarfile.FIFOTYPE),
            member(NAME, type=tarfile.CHRTYPE, devmajor=1, devminor=5),
            member(NAME, type=tarfile.DIRTYPE),
            member(NAME, type=tarfile.GNUTYPE_SPARSE),
            member(NAME, type=tarfile.XHDTYPE),
            member(NAME, type=tarfile.GNUTYPE_LONGNAME),
            tarfile.TarInfo(NAME).tobuf()[:124] + b"\x80" + bytes(10) + b"\xff" + bytes(376),
            b"not a header" * 43,
            b"cut off",
            b"",
        ],
    )
    def test_members_that_no_export_writes(
        self, here: ChunkStore, file: Path, rest: bytes, tmp_path: Path
    ) -> None:
        file.write_bytes(beginning() + chunk_member() + rest + (END if rest else b""))
        before = sorted(tmp_path.iterdir())
        with pytest.raises(InvalidOption, match="no archive of chunk caches, or is damaged"):
            import_caches(here, file)
        assert len(here.keys()) == 1, "what stood before it"
        assert sorted(tmp_path.iterdir()) == before

    def test_a_member_larger_than_the_file(self, here: ChunkStore, file: Path) -> None:
        info = tarfile.TarInfo(NAME)
        info.size = 2**60
        file.write_bytes(beginning() + info.tobuf(tarfile.GNU_FORMAT) + END)
        with pytest.raises(InvalidOption, match="no whole one"):
            import_caches(here, file)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "no member at byte 0"),
            (END, "'nothing' where 'archive.json' belongs"),
            (member("archive.json", b"{"), "description cannot be read"),
            (member("archive.json", b"[" * 10**5), "description cannot be read"),
            (member("archive.json", b"7"), "description cannot be read"),
            (member("archive.json", bytes(2**21)), "'archive.json' where 'archive.json' belongs"),
            (member("secret", SECRET), "'secret' where 'archive.json' belongs"),
            (beginning(samkv_archive=2), "import it with a newer release"),
            (beginning(format_version=3), "this release uses .*export it again"),
            (beginning(fingerprints=[{"model": "x"}]), "description cannot be read"),
            (beginning(fingerprints=[{**asdict(TINY), "n_heads": [1]}]), "cannot be read"),
            (beginning()[:1024] + member("secret", b"short"), "secret has 5 bytes"),
        ],
    )
    def test_a_beginning_that_no_export_writes(
        self, here: ChunkStore, file: Path, content: bytes, message: str
    ) -> None:
        file.write_bytes(content + (END if content else b""))
        with pytest.raises(InvalidOption, match=message):
            import_caches(here, file)

    @pytest.mark.parametrize("what", ["absent", "folder", "pipe", "device"])
    def test_what_is_no_file(self, here: ChunkStore, tmp_path: Path, what: str) -> None:
        file = tmp_path / "file"
        if what == "folder":
            file.mkdir()
        elif what == "pipe":
            os.mkfifo(file)
        elif what == "device":
            file.symlink_to("/dev/zero")
        with pytest.raises(InvalidOption, match="'samkv store export' wrote"):
            import_caches(here, file)

    def test_damaged_caches_are_left_out(self, here: ChunkStore, file: Path) -> None:
        good = chunk_member()
        data = bytearray(good)
        data[-700] ^= 1
        other_secret = beginning().replace(SECRET, SECRET[::-1])
        file.write_bytes(beginning() + bytes(data) + good + END)
        assert found(import_caches(here, file)) == (1, 0, 0, 1)
        file.write_bytes(other_secret + good + END)
        assert found(import_caches(ChunkStore(here.path, namespace="x"), file)) == (0, 0, 0, 1)

    @pytest.mark.parametrize(
        "change",
        [
            {"n_layers": 0}, {"n_heads": 0}, {"block_size": 0}, {"n_init": 0}, {"store_bits": 3},
            {"dtype": "nothing"}, {"dtype": "load"}, {"head_dim": 10**9}, {"format_version": 3},
            {"n_layers": -2}, {"n_kv_heads": -2, "head_dim": -8}, {"head_dim": 0},
            {"n_layers": "2"}, {"model": None}, {"rope": 1.5}, {"more": 1},
            {"block_size": -4}, {"n_local": -1},
        ],
    )  # fmt: skip
    def test_fields_that_a_maker_made_up(
        self, here: ChunkStore, file: Path, change: dict[str, object]
    ) -> None:
        """Under the archive's own secret a stranger can sign what he likes."""
        file.write_bytes(beginning() + signed(change) + END)
        assert import_caches(here, file).n_damaged == 1
        assert here.keys() == []

    def test_what_is_signed_here_would_be_taken(self, here: ChunkStore, file: Path) -> None:
        file.write_bytes(beginning() + signed({"weights": "w7"}) + END)
        assert found(import_caches(here, file)) == (1, 0, 0, 0)

    def test_thousands_of_mutations(self, store: ChunkStore, tmp_path: Path, file: Path) -> None:
        """Each is refused, or what it holds is as it was exported."""
        chunks = {tuple(chunk.token_ids.tolist()): chunk for chunk in fill(store, 3)}
        export_caches(store, file)
        whole = file.read_bytes()
        refused = damaged = 0
        for number, content in enumerate(mutations(whole, 400)):
            file.write_bytes(content)
            mine = MemoryStore()
            try:
                damaged += import_caches(mine, file).n_damaged
            except (InvalidOption, StoreError):
                refused += 1
            for key in mine.keys():
                (made_by,) = mine.fingerprints()
                with mine.open(key, made_by) as opened:
                    got = opened.chunk()
                expected = chunks[tuple(got.token_ids.tolist())]
                assert torch.equal(got.entries, expected.entries), number
                assert got.text == expected.text, number
        assert refused > 50 and damaged > 50


def mutations(whole: bytes, number: int) -> Iterator[bytes]:
    drawn = random.Random(0)
    for _ in range(number):
        at = drawn.randrange(len(whole))
        kind = drawn.randrange(4)
        if kind == 0:
            yield whole[:at] + bytes([whole[at] ^ 1 << drawn.randrange(8)]) + whole[at + 1 :]
        elif kind == 1:
            yield whole[:at]
        elif kind == 2:
            stop = min(len(whole), at + drawn.randrange(1, 2000))
            yield whole[:at] + drawn.randbytes(stop - at) + whole[stop:]
        else:
            block = 512 * drawn.randrange(len(whole) // 512)
            field = block + drawn.randrange(512)
            yield whole[:field] + drawn.randbytes(1) + whole[field + 1 :]


def test_a_temporary_copy_leaves_nothing_behind(
    store: ChunkStore, here: ChunkStore, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store)
    export_caches(store, file)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    import_caches(here, file)
    file.write_bytes(file.read_bytes()[:9000] + b"x")
    with pytest.raises(InvalidOption):
        import_caches(here, file)
    assert not list(scratch.iterdir())
