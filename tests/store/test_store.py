"""The two stores: one contract, equal tensors, and what only a folder on disk has to survive."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import stat
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samkv_integrations.errors import CacheMiss, InvalidOption, StoreError
from samkv_integrations.store.chunk import ChunkCache
from samkv_integrations.store.disk import ChunkStore
from samkv_integrations.store.indexed import IndexedStore
from samkv_integrations.store.memory import MemoryStore
from samkv_integrations.store.upkeep import gc, verify
from tests.contracts.store_contract import (
    StoreContract,
    arrays_of,
    assert_same,
    chunk_for,
    read,
    read_all,
    reason,
)
from tests.support.chunks import TINY, random_chunk


class TestMemoryStore(StoreContract):
    has_files = False

    @pytest.fixture
    def make(self) -> Callable[..., IndexedStore]:
        return MemoryStore

    def test_a_budget_evicts_the_oldest(self, store: IndexedStore) -> None:
        chunks = [chunk_for(store, seed) for seed in range(3)]
        for chunk in chunks[:2]:
            store.put(chunk)
        store.set_budget(store.stats().bytes)
        store.put(chunks[2])
        assert store.keys() == sorted(chunk.key for chunk in chunks[1:])
        assert store.is_evicted(chunks[0].key, TINY)


class TestChunkStore(StoreContract):
    @pytest.fixture
    def make(self, tmp_path: Path) -> Callable[..., IndexedStore]:
        numbers = count()
        return lambda **options: ChunkStore(tmp_path / f"store{next(numbers)}", **options)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_disk_gives_the_tensors_of_memory(data: st.DataObject) -> None:
    """Any sizes, any blocks, any order, with repetitions."""
    fingerprint = replace(
        TINY,
        dtype=data.draw(st.sampled_from(["float32", "bfloat16"])),
        n_layers=data.draw(st.integers(1, 3)),
        block_size=data.draw(st.integers(1, 7)),
        n_init=data.draw(st.integers(0, 3)),
        n_local=data.draw(st.integers(0, 3)),
        store_bits=data.draw(st.sampled_from([4, 8, 16])),
    )
    n_tokens = data.draw(st.integers(1, 60))
    n_blocks = fingerprint.scheme.of(n_tokens).n_blocks
    chunk = random_chunk(data.draw(st.integers(0, 2**31)), n_tokens, fingerprint)
    requests = data.draw(
        st.lists(
            st.tuples(
                st.integers(0, fingerprint.n_layers - 1),
                st.lists(st.integers(0, n_blocks - 1), max_size=2 * n_blocks),
            ),
            max_size=8,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        disk, memory = ChunkStore(folder), MemoryStore()
        for store in (disk, memory):
            store.put(chunk)
        assert disk.stats() == memory.stats()
        with disk.open(chunk.key, fingerprint) as one, memory.open(chunk.key, fingerprint) as other:
            for layer, blocks in requests:
                before = one.bytes_read, other.bytes_read
                assert np.array_equal(read(one, layer, blocks), read(other, layer, blocks))
                assert one.bytes_read - before[0] == other.bytes_read - before[1]
            if data.draw(st.booleans()):
                assert_same(arrays_of(one, chunk), arrays_of(other, chunk))
            assert np.array_equal(read_all(one), read_all(other))
            assert_same(arrays_of(one, chunk), arrays_of(other, chunk))
            one.verify()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> ChunkStore:
    return ChunkStore(folder)


def files(folder: Path) -> set[str]:
    """All but the index."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {name for name in found if not name.startswith("index")}


def place_of(folder: Path, chunk: ChunkCache) -> Path:
    return folder / chunk.fingerprint.digest / chunk.key[:2] / f"{chunk.key}.safetensors"


def test_files_are_where_the_specification_has_them(store: ChunkStore, folder: Path) -> None:
    chunk = chunk_for(store, 1)
    store.put(chunk)
    name = f"{TINY.digest}/{chunk.key[:2]}/{chunk.key}.safetensors"
    assert files(folder) == {"store.json", "secret", name}
    assert len(list(folder.glob("index-*.sqlite"))) == 1
    assert json.loads((folder / "store.json").read_text())["format_version"] == 5
    assert len((folder / "secret").read_bytes()) == 32
    assert set(os.listdir(folder)) >= {"index.lock", TINY.digest}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_folders_and_files_are_their_owners_whatever_the_umask(folder: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        store = ChunkStore(folder)
        chunk = chunk_for(store, 1)
        store.put(chunk)
        store.put_note("one", "two")
        store.quarantine(chunk.key, TINY)
    finally:
        os.umask(before)
    for path in (folder, *folder.rglob("*")):
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) & ~expected == 0, path


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_is_refused(folder: Path, mode: int) -> None:
    ChunkStore(folder)
    folder.chmod(mode)
    with pytest.raises(StoreError, match=f"next step: chmod go-w {folder}"):
        ChunkStore(folder)
    folder.chmod(0o755)
    ChunkStore(folder)


def test_a_store_is_found_again(folder: Path) -> None:
    first = ChunkStore(str(folder))
    chunk = chunk_for(first, 1)
    first.put(chunk)
    again = ChunkStore(folder)
    assert again.key(TINY, chunk.token_ids.tolist()) == chunk.key
    assert again.fingerprints() == [TINY]
    with again.open(chunk.key, TINY, chunk.token_ids.tolist()) as stored:
        stored.verify()
    tenant = ChunkStore(folder, namespace="tenant")
    assert tenant.key(TINY, chunk.token_ids.tolist()) != chunk.key


def test_what_another_process_does_is_seen_at_once(store: ChunkStore, folder: Path) -> None:
    other, chunk = ChunkStore(folder), chunk_for(store, 1)
    assert not store.contains(chunk.key, TINY)
    other.put(chunk)
    assert store.contains(chunk.key, TINY) and store.keys() == [chunk.key]
    assert store.text(chunk.key) == chunk.text and store.fingerprints() == [TINY]
    other.delete(chunk.key)
    assert not store.contains(chunk.key, TINY) and store.keys() == []
    assert store.text(chunk.key) is None and store.fingerprints() == []


def test_of_several_that_put_a_note_the_first_wins(folder: Path) -> None:
    stores = [ChunkStore(folder) for _ in range(3)]
    kept = [each.put_note("owner", str(place), replace=False) for place, each in enumerate(stores)]
    assert kept == [True, False, False] and stores[-1].note("owner") == "0"


def test_folders_that_are_no_store_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    for path, message in (
        ("file", "is not a folder"),
        ("file/below", "File exists"),
        ("photos", "holds 'cat.jpg'"),
    ):
        with pytest.raises(StoreError, match=message) as caught:
            ChunkStore(tmp_path / path)
        assert str(tmp_path / path) in str(caught.value) and "next step" in str(caught.value)
    assert files(tmp_path) == {"file", "photos/cat.jpg"}


def test_a_store_made_by_another_process_meanwhile_is_taken_for_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files appear between our look for a marker and our look for anything else."""
    others = []

    def slow_listdir(path: Path) -> list[str]:
        monkeypatch.undo()
        others.append(ChunkStore(folder))
        others[0].put(chunk_for(others[0], 1))
        return os.listdir(path)

    monkeypatch.setattr(os, "listdir", slow_listdir)
    assert ChunkStore(folder).keys() == others[0].keys() != []


@pytest.mark.parametrize("version", [1, 4, 7])
def test_another_format_version_is_refused(store: ChunkStore, folder: Path, version: int) -> None:
    marker = {"format_version": version, "secret_check": ""}
    (folder / "store.json").write_text(json.dumps(marker))
    with pytest.raises(StoreError, match=f"version {version}, this release uses 5; next step"):
        ChunkStore(folder)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", "null", "\xff", '{"format_version": 5}'],
)
def test_a_broken_marker_is_refused(store: ChunkStore, folder: Path, content: str) -> None:
    (folder / "store.json").write_text(content, encoding="latin-1")
    with pytest.raises(StoreError, match=r"store\.json is damaged; next step"):
        ChunkStore(folder)


@pytest.mark.parametrize("damage", ["short", "flipped", "gone", "another"])
def test_a_damaged_secret_is_refused_and_not_replaced(
    store: ChunkStore, folder: Path, damage: str
) -> None:
    file = folder / "secret"
    data = bytearray(file.read_bytes())
    data[7] ^= 1
    if damage == "gone":
        file.unlink()
    else:
        others = {"short": b"short", "another": bytes(32)}
        file.write_bytes(others.get(damage, bytes(data)))
    before = contents(folder)
    state = "missing" if damage == "gone" else "damaged"
    with pytest.raises(StoreError, match=f"secret is {state}.*next step: restore it"):
        ChunkStore(folder)
    assert contents(folder) == before


@pytest.mark.parametrize("leftover", ["store.json.x1_2.tmp", "secret.abc.tmp", "secret"])
def test_a_beginning_that_was_cut_short_is_finished(folder: Path, leftover: str) -> None:
    folder.mkdir()
    (folder / leftover).write_bytes(bytes(32))
    store = ChunkStore(folder)
    chunk = chunk_for(store, 1)
    store.put(chunk)
    assert ChunkStore(folder).keys() == [chunk.key]


def test_strange_files_in_a_store_are_overlooked(store: ChunkStore, folder: Path) -> None:
    chunk = chunk_for(store, 1)
    store.put(chunk)
    place = folder / TINY.digest / chunk.key[:2]
    elsewhere = ("0" if chunk.key.startswith("f") else "f") * 32  # belongs into another folder
    for name in ("notes.safetensors", f"{elsewhere}.safetensors", f"{chunk.key}.safetensors.a.tmp"):
        (place / name).touch()
    (folder / "notes").mkdir()
    (folder / ("0" * 32)).touch()
    assert ChunkStore(folder).keys() == [chunk.key]
    assert store.stats().n_chunks == 1
    assert store.fingerprints() == [TINY]
    assert store.text(elsewhere) is None


def test_text_survives_the_loss_of_the_cache(store: ChunkStore, folder: Path) -> None:
    lost, broken = chunk_for(store, 1), chunk_for(store, 2)
    for chunk in (lost, broken):
        store.put(chunk)
    place_of(folder, lost).unlink()
    place_of(folder, broken).write_bytes(b"")
    assert reason(lambda: store.open(lost.key, TINY)) == "absent"
    assert reason(lambda: store.open(broken.key, TINY)) == "corrupt"
    assert not store.contains(lost.key, TINY)
    store.record(TINY, missed=[lost.key, broken.key])
    assert store.keys() == [broken.key]
    for chunk in (lost, broken):
        assert store.text(chunk.key) == chunk.text
        assert store.delete(chunk.key)
        assert store.text(chunk.key) is None


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in files(folder)}


@pytest.mark.parametrize("step", ["fsync", "replace", "mkdir"])
def test_a_failing_write_is_named_and_leaves_nothing(
    store: ChunkStore, folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    before = files(folder)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    chunk = chunk_for(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        with pytest.raises(StoreError, match="No space left on device; next step") as caught:
            store.put(chunk)
    assert str(folder) in str(caught.value)
    assert files(folder) == before
    store.put(chunk)
    store.open(chunk.key, TINY).close()


def test_a_disk_that_is_full_halfway_keeps_the_older_cache(store: ChunkStore, folder: Path) -> None:
    chunk = chunk_for(store, 1, 2000)
    store.put(chunk)
    before = files(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(StoreError, match="File too large; next step"):
            store.put(replace(chunk, entries=chunk.entries ^ 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(folder) == before
    with store.open(chunk.key, TINY) as stored:
        stored.verify()
        assert np.array_equal(read(stored, 0, [0]), chunk.entries[0, :4])


def test_an_interrupted_write_leaves_no_temporary_file(
    store: ChunkStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(folder)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.put(chunk_for(store, 1))
    assert files(folder) == before


def test_obstacles_are_named(store: ChunkStore, folder: Path) -> None:
    chunk = chunk_for(store, 1)
    (folder / TINY.digest).touch()
    with pytest.raises(StoreError, match="Not a directory; next step"):
        store.put(chunk)
    assert store.text(chunk.key) is None and store.keys() == [] and store.stats().n_chunks == 0
    assert reason(lambda: store.open(chunk.key, TINY)) == "absent"


@pytest.mark.parametrize("obstacle", ["pipe", "link", "socket"])
def test_what_lies_in_the_place_of_a_cache_goes(
    store: ChunkStore, folder: Path, obstacle: str
) -> None:
    chunk = chunk_for(store, 1)
    file = place_of(folder, chunk)
    file.parent.mkdir(parents=True)
    match obstacle:
        case "pipe":
            os.mkfifo(file)
        case "link":
            file.symlink_to("/dev/zero")
        case _:
            os.mknod(file, stat.S_IFSOCK | 0o600)
    assert reason(lambda: store.open(chunk.key, TINY)) == "corrupt"
    assert not store.contains(chunk.key, TINY)
    store.begin_to_fetch([chunk.key], TINY)
    store.put(chunk)
    with store.open(chunk.key, TINY) as stored:
        stored.verify()
    gc(store)
    assert files(folder) == {"store.json", "secret", str(file.relative_to(folder))}
    assert Path("/dev/zero").exists()


@pytest.mark.parametrize("obstacle", ["pipe", "device", "large file"])
@pytest.mark.parametrize("name", ["store.json", "secret", "costs.json"])
def test_what_lies_in_the_place_of_a_small_file_is_not_read(
    store: ChunkStore, folder: Path, name: str, obstacle: str
) -> None:
    """A question would wait for the writer of a pipe, and read a device until memory is full."""
    file = folder / name
    file.unlink(missing_ok=True)
    match obstacle:
        case "pipe":
            os.mkfifo(file)
        case "device":
            file.symlink_to("/dev/zero")
        case _:
            file.write_bytes(bytes((1 << 20) + 1))
    match name:
        case "costs.json":
            assert store.note("costs") is None
        case _:
            with pytest.raises(StoreError, match=f"{name} is (not a regular file|larger than 1)"):
                ChunkStore(folder)


def test_a_file_that_is_cleared_up_while_it_is_written_is_an_error(
    store: ChunkStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the `gc` of a machine whose clock is ahead: nobody was told that nothing was kept."""

    def cleared_up(handle: int) -> None:
        for file in folder.rglob("*.tmp"):
            file.unlink()

    monkeypatch.setattr(os, "fsync", cleared_up)
    with pytest.raises(StoreError, match="No such file or directory"):
        store.put(chunk_for(store, 1))
    assert store.keys() == [] and store.stats().bytes == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [({"path": 5}, "path=5; it must be the path of a folder"),
     ({"path": "a\0b"}, r"path='a\\x00b'; it must be the path of a folder"),
     ({"path": "\ud800"}, r"path='\\ud800'; it must be the path of a folder"),
     ({"remote": "file:///a\0b"}, r"remote='/a\\x00b'; it must be the path of a folder"),
     ({"remote": ["x"]}, r"remote=\['x'\] cannot be opened.*give a URL"),
     ({"remote": "memory://x", "remote_options": 5}, "remote_options= as a mapping"),
     ({"quota": ["a"]}, r"quota=\['a'\]; it must be a mapping of namespaces to bytes"),
     ({"quota": {5: 5}}, "namespace=5; it must be a string")],
)  # fmt: skip
def test_options_of_another_type_are_refused(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidOption, match=message):
        ChunkStore(**{"path": folder, **options})
    assert not folder.exists()


def test_a_secret_may_be_a_link(store: ChunkStore, folder: Path) -> None:
    (folder / "secret").rename(folder.parent / "mounted")
    (folder / "secret").symlink_to(folder.parent / "mounted")
    assert ChunkStore(folder).secret == store.secret


def test_a_store_that_was_removed_is_not_made_again(store: ChunkStore, folder: Path) -> None:
    """A half of a store (no marker, no secret) would be refused by everyone who opens it later."""
    chunk = chunk_for(store, 1)
    folder.rename(folder.with_name("moved"))
    with pytest.raises(StoreError, match="is no longer the store .* next step: open it anew"):
        store.put(chunk)
    with pytest.raises(StoreError, match="cannot use the index.*next step: open the store anew"):
        store.keys()
    assert reason(lambda: store.open(chunk.key, TINY)) == "absent"
    assert not folder.exists()


def test_a_store_that_was_emptied_stays_empty(store: ChunkStore, folder: Path) -> None:
    """Nothing of a half of a store is left: the next process makes it anew."""
    store.put(chunk_for(store, 1))
    shutil.rmtree(folder)
    folder.mkdir(mode=0o700)
    for use in (
        lambda: store.put(chunk_for(store, 1)),
        lambda: store.put_note("measured", "{}"),
        lambda: store.set_budget(1_000_000),
        lambda: store.delete(chunk_for(store, 1).key),
        lambda: store.forget(lambda text: True),
        lambda: gc(store),
        lambda: verify(store, repair=True),
        store.stats,
        store.keys,
    ):
        with pytest.raises(StoreError, match="next step: open it anew"):
            use()
    again = ChunkStore(folder)
    again.put(chunk_for(again, 2))
    assert len(assert_sound(folder).keys()) == 1


def test_a_store_that_was_made_anew_by_another_is_left_alone(
    store: ChunkStore, folder: Path
) -> None:
    """Under its secret what is ours would be damage, and under ours everything of it."""
    store.put(chunk_for(store, 1))
    shutil.rmtree(folder)
    anew = ChunkStore(folder)
    theirs = chunk_for(anew, 1)
    anew.put(theirs)
    for use in (
        lambda: store.put(chunk_for(store, 2)),
        lambda: store.put_note("measured", "{}"),
        lambda: store.delete(chunk_for(store, 1).key),
        lambda: store.forget(lambda text: True),
        lambda: gc(store),
        lambda: verify(store, repair=True),
    ):
        with pytest.raises(StoreError, match="next step: open it anew"):
            use()
    assert reason(lambda: store.open(chunk_for(store, 1).key, TINY)) == "absent"
    assert anew.keys() == [theirs.key] == assert_sound(folder).keys()
    assert verify(anew).damaged == ()


def assert_sound(folder: Path) -> ChunkStore:
    """The store opens; what is there verifies and has its text; ingest goes on.

    Who deletes may have been killed before the index was told, so one may be missing.
    """
    store = ChunkStore(folder)
    for is_cleared_up in (False, True):
        for key in store.keys():
            try:
                with store.open(key, TINY) as stored:
                    stored.verify()
            except CacheMiss as miss:
                assert miss.reason == "absent" and not is_cleared_up
            assert store.text(key)
        gc(store)
    chunk = chunk_for(store, 1000)
    store.put(chunk)
    store.open(chunk.key, TINY, chunk.token_ids.tolist()).close()
    assert store.delete(chunk.key)
    return store


@pytest.fixture(scope="module")
def processes() -> ForkContext:
    """Children are forks, which need not import everything anew; no thread here holds a lock."""
    return multiprocessing.get_context("fork")


def make_stores(folder: Path, start: Barrier, pipe: Connection) -> None:
    keys = []
    for number in range(20):
        start.wait(timeout=60)
        keys.append(ChunkStore(folder / str(number)).key(TINY, [1, 2, 3]))
    pipe.send(keys)


def test_processes_that_make_a_store_at_once_share_its_secret(
    tmp_path: Path, processes: ForkContext
) -> None:
    start = processes.Barrier(3)
    pipes = [processes.Pipe(duplex=False) for _ in range(3)]
    makers = [
        processes.Process(target=make_stores, args=(tmp_path, start, child)) for _, child in pipes
    ]
    for process in makers:
        process.start()
    for process in makers:
        process.join(60)
    assert [process.exitcode for process in makers] == [0, 0, 0]
    found = [parent.recv() for parent, _ in pipes]
    assert len(found[0]) == 20 and found[0] == found[1] == found[2]
    for number in range(20):
        assert files(tmp_path / str(number)) == {"store.json", "secret"}


def put_and_die(folder: Path, step: int) -> None:
    """Makes a store and puts a chunk; is killed before the given system call."""
    steps = count()

    def dying(call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **options: object) -> object:
            if next(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return wrapped

    for name in ("mkdir", "open", "fsync", "link", "replace", "rename", "unlink"):
        setattr(os, name, dying(getattr(os, name)))
    store = ChunkStore(folder)
    store.put(chunk_for(store, 1))


def test_a_writer_may_be_killed_at_every_step(tmp_path: Path, processes: ForkContext) -> None:
    for step in count():
        folder = tmp_path / str(step)
        process = processes.Process(target=put_and_die, args=(folder, step))
        process.start()
        process.join(60)
        assert sum(name.endswith(".tmp") for name in files(folder)) <= 1
        store = assert_sound(folder)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert store.contains(chunk_for(store, 1).key, TINY)
    # store.json, secret, cache: six of the calls each
    assert step >= 3 * 6


def put_forever(folder: Path, pipe: Connection) -> None:
    store = ChunkStore(folder)
    chunks = [chunk_for(store, seed, 200) for seed in range(10)]
    pipe.send("ready")
    while True:
        for chunk in chunks:
            store.put(chunk)
            store.delete(chunk.key)
            store.put(chunk)


def test_a_writer_may_be_killed_at_any_moment(folder: Path, processes: ForkContext) -> None:
    moments = random.Random(5)
    for _ in range(8):
        parent, child = processes.Pipe(duplex=False)
        process = processes.Process(target=put_forever, args=(folder, child))
        process.start()
        child.close()  # so that `recv` ends if the process does
        assert parent.recv() == "ready"
        process.join(timeout=moments.uniform(0.0, 0.1))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert_sound(folder)


def put_often(folder: Path, start: Barrier) -> None:
    store = ChunkStore(folder)
    chunks = [chunk_for(store, seed, 60) for seed in range(4)]
    start.wait(timeout=60)
    for _ in range(10):
        for chunk in chunks:
            store.put(chunk)


def test_readers_among_writers_see_whole_chunks_only(folder: Path, processes: ForkContext) -> None:
    start = processes.Barrier(3)
    writers = [processes.Process(target=put_often, args=(folder, start)) for _ in range(2)]
    for process in writers:
        process.start()
    start.wait(timeout=60)
    store = ChunkStore(folder)
    chunks = [chunk_for(store, seed, 60) for seed in range(4)]
    misses = set()
    while any(process.is_alive() for process in writers):
        for chunk in chunks:
            try:
                with store.open(chunk.key, TINY, chunk.token_ids.tolist()) as stored:
                    stored.verify()
                    assert np.array_equal(read(stored, 1, [2]), chunk.entries[1, 8:12])
            except CacheMiss as miss:
                misses.add(miss.reason)
    assert [process.exitcode for process in writers] == [0, 0]
    assert misses <= {"absent"}
    assert store.keys() == sorted(chunk.key for chunk in chunks)
    assert len(files(folder)) == 2 + len(chunks)


def test_a_chunk_that_was_let_go_holds_no_file(store: ChunkStore) -> None:
    chunk = chunk_for(store, 1)
    store.put(chunk)
    file = store.file(chunk.key, TINY.digest)
    with store.open(chunk.key, TINY) as stored:
        stored.let_go()
        stored.verify()
        other = file.with_suffix(".other")
        other.write_bytes(file.read_bytes())
        os.replace(other, file)
        assert reason(stored.verify) == "absent"
        file.unlink()
        assert reason(stored.verify) == "absent"
        file.symlink_to("/dev/zero")
        assert reason(stored.verify) == "corrupt"


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_a_killed_writer_has_put_is_put_again(store: ChunkStore, is_lost: bool) -> None:
    """Its file was in place, and the index had not been told."""
    chunk = chunk_for(store, 1)
    store.put(chunk)
    if is_lost:
        with store.index.transaction(writes=True) as connection:
            connection.execute("UPDATE chunks SET state = 2, bytes = 0")
    else:
        data = store.file(chunk.key, TINY.digest).read_bytes()
        store.delete(chunk.key)
        store.file(chunk.key, TINY.digest).write_bytes(data)
    assert not store.contains(chunk.key, TINY) and store.keys() == []
    store.open(chunk.key, TINY).close()
    store.put(chunk)
    assert store.keys() == [chunk.key] and store.text(chunk.key) == chunk.text
    assert store.stats().bytes == store.file(chunk.key, TINY.digest).stat().st_size


def test_a_disk_that_is_shared_by_a_fork(store: ChunkStore) -> None:
    one, other = chunk_for(store, 1), chunk_for(store, 2)
    store.put(one)
    child = multiprocessing.get_context("fork").Process(target=lambda: store.put(other))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert store.keys() == sorted([one.key, other.key])
