"""Stores that share their caches through a place of fsspec's."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from samkv_integrations.errors import CacheMiss, InvalidOption, StoreError
from samkv_integrations.prompt.layout import PromptChunk, find_runs
from samkv_integrations.store import objects as objects_module
from samkv_integrations.store.disk import ChunkStore
from samkv_integrations.store.indexed import IndexedStore
from samkv_integrations.store.objects import AT_ONCE, ObjectInfo, Objects
from samkv_integrations.store.tier import SharedTier
from samkv_integrations.store.upkeep import Moved, gc, pull, push
from tests.contracts.store_contract import StoreContract, chunk_for, read_all, reason
from tests.support.chunks import TINY
from tests.support.processes import wait_until
from tests.support.s3_server import s3_server

SECRET = bytes(range(32))
NUMBERS = count()
Machine = Callable[..., ChunkStore]


@pytest.fixture(autouse=True)
def refresh_soon(monkeypatch: pytest.MonkeyPatch) -> Callable[[SharedTier], None]:
    """What goes on in a thread of its own, and would be counted now here and now there."""
    soon = SharedTier.refresh_soon
    monkeypatch.setattr(SharedTier, "refresh_soon", lambda self: None)
    return soon


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    with s3_server() as options:
        yield options


# three tests ask the server in every run; objects there are written, listed and deleted alike
@pytest.fixture(params=["memory", "file", pytest.param("s3", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """The URL of a new place, and fsspec's options."""
    name = f"place{next(NUMBERS)}"
    match request.param:
        case "memory":
            return f"memory://{name}", {}
        case "file":
            return f"file://{tmp_path}/{name}", {}
    return f"s3://caches/{name}", request.getfixturevalue("s3")


def machines(folder: Path, **given: Any) -> Machine:
    """Makes stores as of different machines, in folders of their own."""
    numbers = count()

    def make(**options: Any) -> ChunkStore:
        path = folder / f"machine{next(numbers)}"
        return ChunkStore(path, **{"secret": SECRET, **given, **options})

    return make


@pytest.fixture
def machine(place: tuple[str, dict[str, Any]], tmp_path: Path) -> Machine:
    url, remote_options = place
    return machines(tmp_path, remote=url, remote_options=remote_options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the place of `local`, which a test may damage."""
    return tmp_path / "place"


@pytest.fixture
def local(folder: Path, tmp_path: Path) -> Machine:
    return machines(tmp_path, remote=f"file://{folder}")


class TestSharedStore(StoreContract):
    """As of one machine, a shared store is one like any other."""

    @pytest.fixture
    def make(self, tmp_path: Path) -> Callable[..., IndexedStore]:
        def made(**options: Any) -> IndexedStore:
            number = next(NUMBERS)
            folder, remote = tmp_path / f"store{number}", f"memory://contract{number}"
            return ChunkStore(folder, remote=remote, **options)

        return made

    def test_a_damaged_chunk_is_put_away_and_its_text_stays(self, store: IndexedStore) -> None:
        """And is fetched again."""
        chunk = chunk_for(store, 1)
        store.put(chunk)
        store.quarantine(chunk.key, TINY)
        assert store.keys() == []
        assert store.contains(chunk.key, TINY)
        with store.open(chunk.key, TINY) as stored:
            stored.verify()
        assert store.text(chunk.key) == chunk.text


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def refreshed(store: ChunkStore) -> tuple[int, int]:
    """How many chunks a machine has learned of when it looks, and how many it has deleted."""
    assert store.shared

    def known() -> set[str]:
        return set(store.index.keys(store.namespace, None))

    before = known()
    store.shared.refresh()
    return len(known() - before), len(before - known())


def fill(store: ChunkStore, n_chunks: int = 1, **options: Any) -> list[Any]:
    chunks = [chunk_for(store, seed, **options) for seed in range(n_chunks)]
    for chunk in chunks:
        store.put(chunk)
    return chunks


def found(store: ChunkStore, chunks: list[Any]) -> list[PromptChunk]:
    prompt = [token for chunk in chunks for token in chunk.token_ids.tolist()]
    return find_runs(prompt, [store.chunk_index(TINY)])


EVERYWHERE = pytest.mark.parametrize("place", ["memory", "file", "s3"], indirect=True)


@EVERYWHERE
def test_another_machine_reads_what_one_has_put(machine: Machine) -> None:
    first, second = machine(), machine()
    (chunk,) = fill(first)
    assert second.contains(chunk.key, TINY)
    assert second.contains(chunk.key, TINY) and not second.contains(chunk.key, TINY, here=True)
    assert first.contains(chunk.key, TINY, here=True)
    with second.open(chunk.key, TINY, chunk.token_ids.tolist()) as stored:
        assert np.array_equal(read_all(stored), chunk.entries)
    assert second.contains(chunk.key, TINY, here=True)
    assert second.keys() == [chunk.key]
    assert [made_by.digest for made_by in machine().fingerprints()] == [TINY.digest]


def test_texts_of_other_machines_are_learned(machine: Machine) -> None:
    first, second = machine(), machine()
    chunks = fill(first, 3)
    assert refreshed(second) == (3, 0)
    assert second.keys() == []
    assert second.known_keys() == sorted(chunk.key for chunk in chunks)
    assert len(found(second, chunks)) == 3
    assert {second.text(chunk.key) for chunk in chunks} == {chunk.text for chunk in chunks}
    assert refreshed(second) == (0, 0)


def test_who_looks_for_texts_learns_them_by_and_by(
    local: Machine, refresh_soon: Callable[[SharedTier], None]
) -> None:
    first, second = local(), local()
    chunks = fill(first, 3)
    assert second.shared and found(second, chunks) == []
    refresh_soon(second.shared)
    for thread in threading.enumerate():
        if thread.name == "samkv-refresh":
            thread.join(60)
    assert len(found(second, chunks)) == 3


@EVERYWHERE
def test_what_one_deletes_all_delete(machine: Machine) -> None:
    first, second, third = machine(), machine(), machine()
    kept, gone = fill(first, 2)
    for chunk in (kept, gone):
        second.open(chunk.key, TINY).close()
    assert refreshed(third) == (2, 0)
    assert first.delete(gone.key) == 1
    for store in (first, third):
        assert reason(lambda store=store: store.open(gone.key, TINY)) == "absent"  # type: ignore[misc]
    assert refreshed(second) == (0, 1)
    assert refreshed(third) == (0, 1)
    for store in (first, second, third):
        assert not store.contains(gone.key, TINY)
        assert store.text(gone.key) is None
        assert store.known_keys() == [kept.key]
        assert not store.file(gone.key, TINY.digest).exists()


def test_a_chunk_of_a_prompt_before_a_deletion_is_not_shared(local: Machine) -> None:
    one, other = local(), local()
    chunk = chunk_for(one, 1)
    since = one.index.deletions(one.namespace)
    one.put(chunk)
    one.delete(chunk.key)
    with pytest.raises(CacheMiss, match="something was deleted meanwhile"):
        one.put(chunk, unless_deleted_since=since)
    assert refreshed(other) == (0, 0)
    assert not one.contains(chunk.key, chunk.fingerprint)


@pytest.mark.parametrize("does", ["puts", "fetches"])
def test_what_a_question_does_during_a_deletion_is_deleted_too(
    does: str, local: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began when the chunk was deleted here, and not yet in the bucket."""
    one, other = local(), local()
    (chunk,) = fill(one)
    delete, calls = SharedTier.delete, count()

    def slow(self: SharedTier, keys: Any) -> set[str]:
        is_first = next(calls) == 0
        if is_first and does == "fetches":
            one.open(chunk.key, TINY).close()
        gone = delete(self, keys)
        if is_first and does == "puts":
            one.put(chunk, unless_deleted_since=one.index.deletions(one.namespace))
        return gone

    monkeypatch.setattr(SharedTier, "delete", slow)
    assert one.delete(chunk.key) == 1
    assert refreshed(other) == refreshed(one) == (0, 0)
    assert not one.contains(chunk.key, TINY) and not one.file(chunk.key, TINY.digest).exists()


def test_a_deletion_goes_on_where_a_question_gives_up(
    local: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = local()
    chunks = fill(store, 8)
    assert store.shared is not None
    objects, removed = store.shared.objects, store.shared.objects.remove
    calls = count()

    def remove(path: str) -> bool:
        if next(calls) == 3:
            objects.give_up("takes longer than 10 s")
        return removed(path)

    monkeypatch.setattr(objects, "remove", remove)
    assert store.delete(*(chunk.key for chunk in chunks)) == 8
    assert refreshed(local()) == (0, 0)


def test_a_chunk_that_is_deleted_while_it_is_fetched_stays_away(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file came after whoever deleted it had looked for it here."""
    first, second = machine(), machine()
    (chunk,) = fill(first)
    read = Objects.read

    def deleted_meanwhile(self: Objects, path: str, *options: Any) -> bytes:
        data = read(self, path, *options)
        if path.endswith(f"{chunk.key}.safetensors"):
            assert second.delete(chunk.key) == 1
        return data

    monkeypatch.setattr(Objects, "read", deleted_meanwhile)
    assert reason(lambda: second.open(chunk.key, TINY)) == "absent"
    assert not second.contains(chunk.key, TINY) and second.text(chunk.key) is None
    assert not second.file(chunk.key, TINY.digest).exists()


@EVERYWHERE
def test_a_bucket_that_was_emptied_deletes_nothing(
    machine: Machine, place: tuple[str, dict[str, Any]]
) -> None:
    """It was not asked to: machines put there again what they have."""
    first, second = machine(), machine()
    chunks = fill(first, 3)
    assert second.shared and first.shared
    assert (refreshed(first), refreshed(second)) == ((0, 0), (3, 0))
    second.open(chunks[0].key, TINY).close()
    url, options = place
    fs, path = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options)
    fs.rm(path, recursive=True)
    with pytest.raises(StoreError, match=r"store\.json is gone; mount the share, or"):
        second.shared.refresh()
    assert second.keys() == [chunks[0].key]
    assert push(second).n_chunks == 1
    assert refreshed(first) == (0, 0)  # though some are there, and others not
    assert len(first.keys()) == 3
    assert push(first).n_chunks == 2
    assert set(first.shared.listed()) == {(TINY.digest, chunk.key) for chunk in chunks}
    assert first.delete(chunks[0].key) == 1  # which is meant
    assert refreshed(second) == (0, 1)


@pytest.mark.parametrize("process", ["the same", "a new one"])
def test_an_empty_folder_in_place_of_a_share_takes_nothing(
    process: str, local: Machine, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = local(), local()
    chunk, other = fill(first, 1)[0], chunk_for(first, 1)
    folder.rename(folder.with_name("away"))
    folder.mkdir()
    if process == "a new one":
        first = ChunkStore(first.path, remote=f"file://{folder}", secret=SECRET)
        assert "store.json is gone" in caplog.text
    assert first.shared and second.shared
    first.put(other)
    assert "cannot be shared with the remote tier" in caplog.text
    with first.open(other.key, TINY) as stored:
        stored.verify()
    for delete in (lambda: first.delete(chunk.key), lambda: first.forget(lambda text: True)):
        with pytest.raises(StoreError, match=r"store\.json is gone"):
            delete()
    assert list(folder.iterdir()) == []
    folder.rmdir()
    folder.with_name("away").rename(folder)
    assert refreshed(first) == (0, 0)  # nor is what was put meanwhile "deleted"
    assert first.keys() == sorted([chunk.key, other.key])
    assert push(first).n_chunks == 1
    assert refreshed(second) == (2, 0)


def test_a_share_that_is_unmounted_before_it_is_listed_deletes_nothing(
    local: Machine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = local()
    chunks = fill(store, 2)
    listed = Objects.listed

    def unmounted(self: Objects, path: str) -> dict[str, ObjectInfo]:
        folder.rename(folder.with_name("away"))
        folder.mkdir()
        return listed(self, path)

    monkeypatch.setattr(Objects, "listed", unmounted)
    assert store.shared
    with pytest.raises(StoreError, match=r"store\.json is gone"):
        store.shared.refresh()
    assert store.keys() == sorted(chunk.key for chunk in chunks)


def test_another_place_deletes_nothing(local: Machine, tmp_path: Path) -> None:
    store = local()
    chunks = fill(store, 2)
    assert store.shared and refreshed(store) == (0, 0)
    again = ChunkStore(store.path, remote=f"file://{tmp_path}/other", secret=SECRET)
    assert again.shared and refreshed(again) == (0, 0)
    assert sorted(again.keys()) == sorted(chunk.key for chunk in chunks)
    assert push(again).n_chunks == 2


def test_texts_are_forgotten_on_all_machines(machine: Machine) -> None:
    first, second = machine(), machine()
    kept, gone = fill(first, 2)
    assert second.forget(lambda body: body == gone.text.strip()) == 1
    assert refreshed(first) == (0, 1)
    assert first.known_keys() == [kept.key]
    assert second.forget(lambda body: False, [kept.token_ids.tolist()]) == 1
    assert machine().known_keys() == []


def test_what_is_shared_is_not_deleted_here_alone(local: Machine, tmp_path: Path) -> None:
    store = local()
    (chunk,) = fill(store)
    alone = ChunkStore(store.path, secret=SECRET)
    for delete in (
        lambda: alone.delete(chunk.key), lambda: alone.forget(lambda body: True)
    ):  # fmt: skip
        with pytest.raises(StoreError, match="1 of these chunk caches are in a remote tier too"):
            delete()
    assert alone.contains(chunk.key, TINY)
    assert store.delete(chunk.key) == 1
    assert alone.delete(chunk.key) == 0


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "stranger"])
def test_a_damaged_object_is_a_miss_until_it_is_put_again(
    damage: str, local: Machine, folder: Path
) -> None:
    first, second = local(), local()
    chunk, other = fill(first, 2)
    (file,) = [file for file in files_of(folder) if file.stem == chunk.key]
    data = bytearray(file.read_bytes())
    match damage:
        case "flip":
            data[-1] ^= 1
        case "cut":
            del data[-100:]
        case "empty":
            data.clear()
        case "stranger":
            data[:] = first.file(other.key, TINY.digest).read_bytes()
    file.write_bytes(data)
    found = reason(lambda: second.open(chunk.key, TINY))
    assert found in ("corrupt", "fingerprint")
    assert not list(second.path.rglob("*.tmp"))
    assert second.stats().bytes == 0
    second.put(chunk)
    with local().open(chunk.key, TINY) as stored:
        stored.verify()


@pytest.mark.parametrize("obstacle", ["pipe", "device", "link"])
def test_what_is_no_plain_file_is_not_read(obstacle: str, local: Machine, folder: Path) -> None:
    """A machine waited for the writer of a pipe, and read a device until its memory was full."""
    first, second = local(), local()
    (chunk,) = fill(first)
    (file,) = files_of(folder)
    file.rename(file.with_name("elsewhere"))
    if obstacle == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero" if obstacle == "device" else file.with_name("elsewhere"))
    assert reason(lambda: second.open(chunk.key, TINY)) == "io"
    assert second.shared and refreshed(second) == (0, 0)
    first.put(chunk)
    assert file.is_file() and not file.is_symlink()
    second.shared.objects.ask_again()
    second.open(chunk.key, TINY).close()


def test_a_damaged_object_was_not_deleted(local: Machine, folder: Path) -> None:
    """Machines that have a sound file keep it."""
    first, second, third = local(), local(), local()
    chunk, other = fill(first, 2)
    second.open(other.key, TINY).close()
    assert first.shared and second.shared and third.shared
    assert refreshed(first)[1] == refreshed(second)[1] == 0
    (file,) = [file for file in files_of(folder) if file.stem == chunk.key]
    file.write_bytes(b"damaged")
    assert reason(lambda: second.open(chunk.key, TINY)) == "corrupt"
    assert refreshed(first) == (0, 0)
    assert first.keys() == sorted([chunk.key, other.key])
    assert first.text(chunk.key) == chunk.text
    assert refreshed(third) == (1, 0)  # of what it was, nothing can be learned
    assert pull(third).n_left == 1 and third.keys() == [other.key]
    first.put(chunk)
    with third.open(chunk.key, TINY) as stored:
        stored.verify()


def test_another_secret_is_refused(machine: Machine) -> None:
    machine()
    with pytest.raises(StoreError, match="another secret"):
        machine(secret=bytes(32))


def test_the_secret_may_be_copied_into_an_empty_folder(
    machine: Machine, place: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    url, remote_options = place
    first = machine()
    (chunk,) = fill(first, 1)
    (tmp_path / "copied").mkdir()
    shutil.copy(first.path / "secret", tmp_path / "copied")
    second = ChunkStore(tmp_path / "copied", remote=url, remote_options=remote_options)
    assert second.secret == first.secret
    with second.open(chunk.key, TINY) as stored:
        stored.verify()


@pytest.mark.parametrize("inside", ["", "/place", "/../own/place"])
def test_a_place_in_the_folder_itself_is_refused(tmp_path: Path, inside: str) -> None:
    with pytest.raises(InvalidOption, match="read the store's secret"):
        ChunkStore(tmp_path / "own", remote=f"file://{tmp_path}/own{inside}")
    beside = ChunkStore(tmp_path / "own", remote=f"file://{tmp_path}/own-place")
    assert beside.shared is not None


@pytest.mark.parametrize("own", ["machine/kv", "link/kv"])
def test_a_folder_in_the_place_would_give_others_its_secret(own: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (tmp_path / "link").symlink_to(place)
    folder = (place if own.startswith("machine") else tmp_path) / own
    with pytest.raises(InvalidOption, match="read the store's secret"):
        ChunkStore(folder, remote=f"file://{place}", secret=SECRET)
    assert list(place.rglob("secret")) == []
    ChunkStore(tmp_path / "place-of-its-own", remote=f"file://{place}", secret=SECRET)


@pytest.mark.parametrize("marker", ["[]", '"x"', "[[1, 2]]", "{", "null"])
def test_a_damaged_marker_is_not_another_secret(local: Machine, folder: Path, marker: str) -> None:
    local()
    (folder / "store.json").write_text(marker)
    with pytest.raises(StoreError, match="store.json is damaged; next step"):
        local()


def test_another_format_is_refused(local: Machine, folder: Path) -> None:
    local()
    marker = folder / "store.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"format_version": 1}))
    with pytest.raises(StoreError, match="has format version 1"):
        local()


def test_the_environment_does_not_lock_out_of_a_folder_of_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ChunkStore(tmp_path / "own").secret
    monkeypatch.setenv("SAMKV_STORE_SECRET", SECRET.hex())
    assert ChunkStore(tmp_path / "own").secret == own
    assert ChunkStore(tmp_path / "new").secret == SECRET
    with pytest.raises(StoreError, match="is a store with another secret"):
        ChunkStore(tmp_path / "own", remote=f"file://{tmp_path}/place")


@pytest.mark.parametrize("secret", ["zz", "00" * 31])
def test_a_secret_that_is_none(
    secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMKV_STORE_SECRET", secret)
    with pytest.raises(InvalidOption, match="32 bytes, in SAMKV_STORE_SECRET 64 hex") as caught:
        ChunkStore(tmp_path / "store")
    assert secret not in str(caught.value)


def test_the_secret_may_be_in_the_environment(
    local: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (chunk,) = fill(local())
    monkeypatch.setenv("SAMKV_STORE_SECRET", SECRET.hex())
    assert local(secret=None).contains(chunk.key, TINY)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("bucket/prefix", "must be a URL with a bucket"),
        ("s3://", "must be a URL with a bucket"),
        ("nowhere://x", "Protocol not known: nowhere"),
        ("", "must be a URL with a bucket"),
    ],
)
def test_a_url_that_is_none(url: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match=message):
        ChunkStore(tmp_path / "store", remote=url)


@pytest.fixture
def no_place(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes a place that fails whatever it is asked."""

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("nobody answers")

    def breaks() -> None:
        for name in ("info", "find", "ls", "exists", "rm_file"):
            monkeypatch.setattr(f"fsspec.implementations.local.LocalFileSystem.{name}", fail)
        for name in ("open_regular", "written"):
            monkeypatch.setattr(objects_module, name, fail)

    return breaks


def test_questions_during_an_outage_do_not_make_it_longer(
    local: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under load each one put off the next try, and the place was never asked again."""
    first, second = local(), local()
    (chunk,) = fill(first, 1)
    assert second.shared is not None
    objects, has_come = second.shared.objects, threading.Event()
    busy = [objects.pool.submit(has_come.wait, 60) for _ in range(AT_ONCE)]
    monkeypatch.setattr(objects_module, "GONE_S", 1.0)
    objects.give_up("takes long")
    monkeypatch.setattr(objects_module, "GONE_S", 1_000.0)
    assert objects.is_gone and reason(lambda: second.open(chunk.key, TINY)) == "io"
    wait_until(lambda: not objects.is_gone, "it is asked again", patience_s=10.0)
    has_come.set()
    assert all(one.result() for one in busy)
    with second.open(chunk.key, TINY) as stored:
        stored.verify()


def test_a_place_that_is_gone_is_a_miss_and_no_error(
    local: Machine, no_place: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = local(), local()
    chunk, other = fill(first, 2)
    no_place()
    assert reason(lambda: second.open(chunk.key, TINY)) == "io"
    with pytest.raises(CacheMiss, match=r"a moment ago \(ConnectionError: nobody answers\)"):
        second.open(chunk.key, TINY)
    assert not second.contains(chunk.key, TINY)
    assert second.fingerprints() == []
    with first.open(chunk.key, TINY) as stored:  # its own it has
        stored.verify()
    second.put(other)
    second.open(other.key, TINY).close()
    assert "cannot be shared with the remote tier" in caplog.text
    with pytest.raises(StoreError, match="nothing is deleted while"):
        second.delete(other.key)
    assert second.contains(other.key, TINY)
    late = local()  # opening one is no error either
    assert reason(lambda: late.open(chunk.key, TINY)) == "io"


@pytest.mark.parametrize("in_its_place", ["link", "file"])
def test_a_share_that_is_not_mounted_is_an_outage(
    in_its_place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    share = tmp_path / "share"
    if in_its_place == "link":
        share.symlink_to(tmp_path / "not mounted")
    else:
        share.write_bytes(b"")
    store = ChunkStore(tmp_path / "machine", remote=f"file://{share}/kv", secret=SECRET)
    (chunk,) = fill(store)
    assert store.keys() == [chunk.key]
    assert "cannot be shared with the remote tier" in caplog.text
    share.unlink()
    assert store.shared and store.shared.objects.is_gone
    assert push(store).n_chunks == 1  # who pushes does not want to be told what was a moment ago


def test_a_folder_that_cannot_be_listed_has_not_been_emptied(
    local: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a share whose connection drops: nothing here is deleted for it."""
    from fsspec.implementations.local import LocalFileSystem

    store = local()
    (chunk,) = fill(store)

    def stale(self: LocalFileSystem, path: str, *args: Any, **options: Any) -> Any:
        raise OSError(errno.ESTALE, "stale")

    monkeypatch.setattr(LocalFileSystem, "find", lambda *args, **options: {})
    monkeypatch.setattr(LocalFileSystem, "info", stale)
    assert store.shared
    with pytest.raises(StoreError, match="stale"):
        store.shared.refresh()
    assert store.keys() == [chunk.key]


def test_what_could_not_be_sent_is_pushed_later(local: Machine, folder: Path) -> None:
    store = local()
    fill(store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "samkv_integrations.store.objects.written",
            lambda *_, **__: (_ for _ in ()).throw(ConnectionError()),
        )
        sent, unsent, gone = fill(store, 3)
    assert len(files_of(folder)) == 1
    store.delete(gone.key)
    assert store.shared
    n_bytes = store.file(unsent.key, TINY.digest).stat().st_size
    assert push(store) == Moved(n_chunks=1, n_bytes=n_bytes, n_left=0)
    assert {file.stem for file in files_of(folder)} == {sent.key, unsent.key}
    assert push(store) == Moved(n_chunks=0, n_bytes=0, n_left=0)
    assert refreshed(store) == (0, 0)
    assert store.contains(unsent.key, TINY)


def test_all_is_pulled_or_as_much_as_there_may_be(local: Machine) -> None:
    first, second = local(), local()
    chunks = fill(first, 4)
    n_bytes = first.stats().bytes
    some = pull(second, max_bytes=n_bytes // 2, progress=True)
    assert (some.n_chunks, some.n_left) == (2, 2)
    assert pull(second).n_chunks == 2
    assert second.keys() == sorted(chunk.key for chunk in chunks)
    assert second.stats().bytes == n_bytes


def test_an_upload_that_is_killed_leaves_nothing_to_be_found(local: Machine, folder: Path) -> None:
    child = os.fork()
    if child == 0:
        os.replace = lambda *_: os.kill(os.getpid(), 9)  # type: ignore[assignment]
        Objects(f"file://{folder}", {}).write("a/b", b"x" * 1000)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -9
    place = Objects(f"file://{folder}", {})
    with pytest.raises(FileNotFoundError):
        place.read("a/b")
    place.write("a/b", b"y")
    assert place.read("a/b") == b"y"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_fetch_that_is_killed_is_done_again(call: str, local: Machine, tmp_path: Path) -> None:
    first, second = local(), local()
    (chunk,) = fill(first)
    child = os.fork()
    if child == 0:
        late = ChunkStore(second.path, secret=SECRET, remote=f"file://{tmp_path / 'place'}")
        fetched = late.file(chunk.key, TINY.digest).name
        before = getattr(os, call)

        def die(what: int | Path, *others: Any) -> None:
            name = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else str(what)
            if fetched in name:
                os.kill(os.getpid(), 9)
            before(what, *others)

        try:
            setattr(os, call, die)
            late.open(chunk.key, TINY).close()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -9
    (left,) = second.path.rglob("*.tmp")
    os.utime(left, (0, 0))
    again = ChunkStore(second.path, secret=SECRET, remote=f"file://{tmp_path / 'place'}")
    again.open(chunk.key, TINY).close()
    assert again.keys() == [chunk.key]
    gc(again)
    assert list(second.path.rglob("*.tmp")) == []
