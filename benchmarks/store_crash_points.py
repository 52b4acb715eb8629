"""A store killed at every point of everything that it does to its folder.

    python -m benchmarks.store_crash_points
    python -m benchmarks.store_crash_points --only evict --point 17  # one of them again

Python tells an audit hook before a file is opened, renamed, linked or removed, a folder made, and
SQLite a trace callback before a statement runs. The k-th of these that concerns the store's folder
kills the process, for every k until the work is done without a kill. Then processes of their own
look at what is left: every chunk is as before the work or as after it, others are as they were,
`gc` leaves nothing over, and the same work can be done again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.store_parts import (
    TINY,
    Violation,
    check_collected,
    chunk_files,
    chunk_of,
    die,
    fingerprint,
    finish,
    in_fresh_process,
    key_of,
    marker,
    markers_in,
    report,
    single_thread,
    start,
    text_of,
    version_in,
)
from samkv_integrations import ChunkStore
from samkv_integrations.errors import CacheMiss, StoreError
from samkv_integrations.store import upkeep

OTHER = fingerprint("w1")
"""Of another model."""

BYSTANDERS = (1, 2, 3)
"""Documents that nothing here may touch: 3 is another tenant's."""

KILLED = -9
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CHANGES = {
    "os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.truncate",
    "os.utime", "os.chmod", "fcntl.flock", "fcntl.lockf", "sqlite3.connect",
}  # fmt: skip


def kill_at(point: int, folder: Path) -> None:
    """This process dies before the ``point``-th change of the folder, counted from 0."""
    steps = count()
    root = str(folder)

    def step(_: object = None) -> None:
        if next(steps) == point:
            die()

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if flags & _WRITES and isinstance(path, str | os.PathLike | bytes):
                name = os.fsdecode(path)  # it may be relative to an open folder
                if name.startswith(root) or not os.path.isabs(name):
                    step()
        elif event in _CHANGES:
            step()

    def connect(*args: Any, **options: Any) -> sqlite3.Connection:
        connection = connect_before(*args, **options)
        connection.set_trace_callback(step)
        return connection

    connect_before, sqlite3.connect = sqlite3.connect, connect
    sys.addaudithook(hook)


# -- what is done to a store ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Work:
    """Something that is done to a store, and what it changes.

    prepare: makes the folder as it is before; None for a folder that is not there.
    act: the work; done again after a kill, it must come to the same.
    before, after: document -> version of its chunk, None for none.
    may_go: documents whose chunk may be evicted, or is damaged, and whose text stays then.
    evictable: those of them that are misses which are counted as evicted, once they went.
    deleted: documents of which nothing at all may be left after the work.
    notes: names of notes that there are.
    has_bystanders: whether the folder holds documents that the work has nothing to do with.
    """

    act: Callable[[Path], None]
    prepare: Callable[[Path], None] | None = None
    before: Mapping[int, int | None] = field(default_factory=dict)
    after: Mapping[int, int | None] = field(default_factory=dict)
    may_go: frozenset[int] = frozenset()
    evictable: frozenset[int] = frozenset()
    deleted: frozenset[int] = frozenset()
    notes: frozenset[str] = frozenset()
    has_bystanders: bool = True

    def __post_init__(self) -> None:
        assert self.before.keys() == self.after.keys()


def put(folder: Path, *numbers: int, version: int = 0, **options: Any) -> None:
    """Puts the chunks of documents."""
    store = ChunkStore(folder, **options)
    for number in numbers:
        store.put(chunk_of(store, number, version))


def put_missing(folder: Path, *numbers: int) -> None:
    """Puts the chunks that are not there, and touches the others, as an ingest does."""
    store = ChunkStore(folder)
    for number in numbers:
        if store.contains(key_of(store, number), TINY):
            store.touch(key_of(store, number), TINY)
        else:
            store.put(chunk_of(store, number))


def filled(*numbers: int, further: Callable[[Path], None] | None = None) -> Callable[[Path], None]:
    """Makes a folder with the bystanders and these documents."""

    def prepare(folder: Path) -> None:
        put(folder, *BYSTANDERS[:2], *numbers)
        put(folder, BYSTANDERS[2], namespace="other")
        if further is not None:
            further(folder)

    return prepare


def delete(folder: Path, *numbers: int) -> None:
    store = ChunkStore(folder)
    store.delete(*(key_of(store, number) for number in numbers))


def forget(folder: Path, *numbers: int) -> None:
    texts = {text_of(number) for number in numbers}
    ChunkStore(folder).forget(texts.__contains__, [list(t.encode()) for t in texts])


def of_two_models(folder: Path) -> None:
    """Document 10 of another model too."""
    store = ChunkStore(folder)
    store.put(chunk_of(store, 10, 0, OTHER))


def a_budget_for(n_chunks: float) -> Callable[[Path], None]:
    """The budget becomes what so many more chunks than the bystanders need."""

    def act(folder: Path) -> None:
        store = ChunkStore(folder)
        held = chunk_files(folder)
        largest = max(held.values())
        kept = sum(held[key_of(store, number)] for number in BYSTANDERS[:2])
        kept += held[key_of(ChunkStore(folder, namespace="other"), BYSTANDERS[2])]
        # the bystanders were used last, so that others go first
        store.record(TINY, used=[key_of(store, number) for number in BYSTANDERS[:2]])
        other = ChunkStore(folder, namespace="other")
        other.record(TINY, used=[key_of(other, BYSTANDERS[2])])
        store.set_budget(max_bytes=kept + int(n_chunks * largest))

    return act


def damage(folder: Path, number: int) -> None:
    """A flipped byte in the chunk of a document."""
    store = ChunkStore(folder)
    (file,) = folder.glob(f"*/*/{key_of(store, number)}.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def find_damaged(folder: Path) -> None:
    """Reads document 10, and moves it out of the way if it is damaged, as an engine does."""
    store = ChunkStore(folder)
    key = key_of(store, 10)
    try:
        with store.open(key, TINY, list(text_of(10).encode())) as opened:
            opened.verify()
    except CacheMiss as miss:
        if miss.reason == "corrupt":
            store.quarantine(key, TINY)


def heal(folder: Path) -> None:
    find_damaged(folder)
    put(folder, 10, version=1)


def leave_debris(folder: Path) -> None:
    """What writers that were killed leave, and a damaged file."""
    for point in range(0, 24, 3):
        pid = start(partial(put_and_die, folder, point), folder.parent / "debris.txt")
        finish(pid)
    damage(folder, 10)
    find_damaged(folder)
    put(folder, 10)


def put_and_die(folder: Path, point: int) -> None:
    kill_at(point, folder)
    put(folder, 11 + point % 2)


def collect(folder: Path) -> None:
    upkeep.gc(ChunkStore(folder))


def lose_index(folder: Path) -> None:
    for file in folder.glob("index-*.sqlite*"):
        file.unlink()


def damage_index(folder: Path) -> None:
    """Its middle is overwritten, and what SQLite had beside it is gone."""
    collect(folder)
    (file,) = folder.glob("index-*.sqlite")
    for beside in folder.glob("index-*.sqlite-*"):
        beside.unlink()
    size = file.stat().st_size
    with file.open("r+b") as damaged:
        damaged.write(b"no database, ")
        damaged.seek(size // 2)
        damaged.write(b"damaged" * 64)


def look(folder: Path) -> None:
    """What makes the index again."""
    store = ChunkStore(folder)
    with suppress(StoreError):  # a damaged one fails once
        store.stats()
    store.keys(TINY)


def agree(folder: Path) -> None:
    assert ChunkStore(folder).agree_block_size(TINY, 16) == 16


def note(folder: Path, *, replace: bool) -> None:
    store = ChunkStore(folder)
    store.put_note("costs", "one", replace=replace)
    assert store.note("costs") == "one"


def zero_note(folder: Path) -> None:
    ChunkStore(folder).put_note("costs", "zero")


def used(folder: Path) -> None:
    """Use of a chunk."""
    store = ChunkStore(folder)
    key = key_of(store, 10)
    store.record(TINY, used=[key], missed=[key_of(store, 11)])
    store.touch(key, TINY)


NEW: Mapping[int, int | None] = {10: None}
OLD: Mapping[int, int | None] = {10: 0}

WORKS: Mapping[str, Work] = {
    "create": Work(
        act=lambda folder: put(folder, 10), before=NEW, after=OLD, has_bystanders=False
    ),
    "create in a folder": Work(
        prepare=lambda folder: folder.mkdir(),
        act=lambda folder: put(folder, 10), before=NEW, after=OLD, has_bystanders=False,
    ),
    "put": Work(prepare=filled(), act=lambda folder: put(folder, 10), before=NEW, after=OLD),
    "put of another model": Work(
        prepare=filled(10), act=of_two_models, before=OLD, after=OLD,
    ),
    "replace": Work(
        prepare=filled(10), act=lambda folder: put(folder, 10, version=1),
        before=OLD, after={10: 1},
    ),
    "delete": Work(
        prepare=filled(10), act=lambda folder: delete(folder, 10),
        before=OLD, after=NEW, deleted=frozenset({10}),
    ),
    "delete several": Work(
        prepare=filled(10, 11, 12), act=lambda folder: delete(folder, 10, 11, 12),
        before={10: 0, 11: 0, 12: 0}, after={10: None, 11: None, 12: None},
        deleted=frozenset({10, 11, 12}),
    ),
    "forget": Work(
        prepare=filled(10, 11, further=of_two_models), act=lambda folder: forget(folder, 10, 11),
        before={10: 0, 11: 0}, after={10: None, 11: None}, deleted=frozenset({10, 11}),
    ),
    "evict by a put": Work(
        prepare=filled(10, 11, further=a_budget_for(2)),
        act=lambda folder: put_missing(folder, 14, 15),  # smaller ones
        before={10: 0, 11: 0, 14: None, 15: None}, after={10: None, 11: None, 14: 0, 15: 0},
        may_go=frozenset({10, 11, 14, 15}), evictable=frozenset({10, 11}),
    ),
    "evict by a smaller budget": Work(
        prepare=filled(10, 11), act=a_budget_for(0.5),
        before={10: 0, 11: 0}, after={10: None, 11: None},
        may_go=frozenset({10, 11}), evictable=frozenset({10, 11}),
    ),
    "quarantine": Work(
        prepare=filled(10, further=lambda folder: damage(folder, 10)), act=find_damaged,
        before=NEW, after=NEW, may_go=frozenset({10}),
    ),
    "heal": Work(
        prepare=filled(10, further=lambda folder: damage(folder, 10)), act=heal,
        before=NEW, after={10: 1}, may_go=frozenset({10}),
    ),
    "gc": Work(
        prepare=filled(10, further=leave_debris), act=collect,
        before={10: 0, 11: 0, 12: 0}, after={10: 0, 11: 0, 12: 0}, may_go=frozenset({11, 12}),
    ),
    "index lost": Work(
        prepare=filled(10, further=lose_index), act=look, before=OLD, after=OLD,
    ),
    "index damaged": Work(
        prepare=filled(10, further=damage_index), act=look, before=OLD, after=OLD,
    ),
    "agree on a block size": Work(prepare=filled(), act=agree),
    "note": Work(
        prepare=filled(), act=partial(note, replace=False), notes=frozenset({"costs"}),
    ),
    "note in place of one": Work(
        prepare=filled(further=zero_note), act=partial(note, replace=True),
        notes=frozenset({"costs"}),
    ),
    "use": Work(prepare=filled(10), act=used, before=OLD, after=OLD),
}  # fmt: skip


# -- what must hold afterwards ----------------------------------------------------------------


def check_documents(folder: Path, work: Work, expected: str) -> None:
    """Every chunk is one of those it may be. expected: ``before or after``, or ``after``."""
    store = ChunkStore(folder)
    for number in BYSTANDERS if work.has_bystanders else ():
        of_one = ChunkStore(folder, namespace="other" if number == BYSTANDERS[2] else "")
        if (found := version_in(of_one, number)) != 0:
            raise Violation(f"bystander {number} has version {found}")
    for number, after in work.after.items():
        allowed = {after}
        if expected == "before or after":
            allowed.add(work.before[number])
        if number in work.may_go:
            allowed.add(None)
        try:
            found = version_in(store, number)
        except Violation:
            if 10 not in work.may_go or number != 10:  # it is the damaged one
                raise
            found = None
        if found not in allowed:
            raise Violation(f"document {number} has version {found}, not one of {allowed}")


def check_nothing_left(folder: Path, work: Work) -> None:
    """After `gc` there is nothing that no chunk needs, and the index agrees with the files."""
    store, other = (ChunkStore(folder, namespace=name) for name in ("", "other"))
    held = check_collected(folder, [store, other], work.notes)
    for number in work.evictable:
        key = key_of(store, number)
        if key not in held and not (store.is_evicted(key, TINY) and store.text(key)):
            raise Violation(f"document {number} went, and is not said to be evicted")
    absent = [
        number
        for number in work.after
        if held.keys().isdisjoint(key_of(store, number, made_by) for made_by in (TINY, OTHER))
        and number not in work.may_go
    ]
    left = markers_in(folder) & {marker(number) for number in absent}
    if left:
        raise Violation(f"texts of documents without a cache: {left} of {absent}")


def check(base: Path, folder: Path, work: Work, is_done: bool) -> None:
    """Raises Violation unless a folder in which the work ended somewhere is as it must be."""
    expected = "after" if is_done else "before or after"
    copy = folder.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    if folder.exists():
        shutil.copytree(folder, copy)

    def at_once() -> None:
        check_documents(folder, work, expected)
        check_nothing_left(folder, work)
        check_documents(folder, work, expected)

    def again() -> None:
        work.act(copy)
        check_documents(copy, work, "after")
        check_nothing_left(copy, work)
        left = markers_in(copy) & {marker(number) for number in work.deleted}
        if left:
            raise Violation(f"deleted, and still there: {left}")

    in_fresh_process(at_once, base)
    in_fresh_process(again, base)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came of one work. points: places at which the process was killed."""

    work: str
    points: int
    violations: int
    seconds: float


def run(name: str, base: Path, only: int | None = None) -> tuple[Row, list[str]]:
    """Kills a work at every point, or at one; what was violated, each with how to repeat it."""
    work, began, violations = WORKS[name], time.monotonic(), []
    made, folder = base / "made", base / "kv"
    if work.prepare is not None:
        in_fresh_process(partial(work.prepare, made), base)
    point = only or 0
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        if made.exists():
            shutil.copytree(made, folder)

        def act(point: int = point) -> None:
            kill_at(point, folder)
            work.act(folder)

        errors = base / "errors.txt"
        errors.unlink(missing_ok=True)
        try:
            code = finish(start(act, errors))
            if code not in (0, KILLED):
                raise Violation(errors.read_text("utf-8"))
            check(base, folder, work, is_done=code == 0)
        except Violation as violation:
            again = f"python -m benchmarks.store_crash_points --only '{name}' --point {point}"
            violations.append(f"{name}, point {point}: {violation}\nagain: {again}")
            code = 0 if len(violations) > 20 else KILLED if point < 2000 else 0
        if code == 0 or only is not None:
            break
        point += 1
    seconds = round(time.monotonic() - began, 1)
    return Row(work=name, points=point, violations=len(violations), seconds=seconds), violations


def main() -> None:
    """The table, on standard output; ends with 1 if anything was violated."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store_crash_points")
    parser.add_argument("--only", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--point", type=int, help="one point only")
    parser.add_argument("--dir", type=Path, help="folder to work in, else a temporary one")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    single_thread()
    rows, violations = [], []
    with tempfile.TemporaryDirectory(dir=chosen.dir) as base:
        for name in chosen.only:
            folder = Path(base, name.replace(" ", "-"))
            folder.mkdir()
            row, found = run(name, folder, chosen.point)
            rows.append(asdict(row))
            violations += found
            sys.stderr.writelines(f"VIOLATED: {one}\n" for one in found)
            sys.stderr.write(f"{row}\n")
    report("store crash points", rows, chosen.json)
    sys.exit(bool(violations))


if __name__ == "__main__":
    main()
