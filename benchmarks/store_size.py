"""What a store costs with few chunks and with many.

    python -m benchmarks.store_size --chunks 1000,100000 --dir stores

Chunks are tiny and their content is random, as what is measured is all but reading it. A tenth of
the texts begin alike. Each row is one store; its figures are taken in a process that has just
opened it. A store that is there already in the folder is measured and not filled again.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.store_parts import (
    die,
    finish,
    in_fresh_process,
    random_chunk,
    report,
    resident_bytes,
    single_thread,
    start,
    tiny_model,
)
from samkv_integrations import ChunkStore, Engine
from samkv_integrations.errors import CacheMiss
from samkv_integrations.runtimes.transformers import Model
from samkv_integrations.store.chunk import Fingerprint

REPEATS = 500
WRITERS = 4
"""Threads that write, as the engine has them."""
BLOCK_SIZE = 4


def text_of(number: int) -> str:
    """The text of a chunk; every tenth begins as the others of these.

    It has more than `MIN_RUN` tokens of its own: by these a chunk is told from those like it.
    """
    first = "All rights reserved. No part of page" if number % 10 == 0 else f"Page {number * 7919}"
    seal = hashlib.blake2b(str(number).encode(), digest_size=16).hexdigest()
    return (
        f"{first} {number} of the archive may be torn out, under the seal {seal}, said its keeper."
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One store. put_ms: one chunk after the other, the last ones. fill_s: all, by four threads.

    start_ms: opening the store and one look-up; after_kill_ms: after a process was killed that
    wrote. lookup_ms, absent_ms: opening a chunk that is
    there, and one that is not. Prompts: find_ms of 2 kB that holds five chunks, first_find_ms the
    first one of a process; numbers_ms of 20 kB like ``[[1, 20240101]]``; alike_ms of a hundred
    paragraphs that begin like a tenth of the chunks. find_bytes: memory that finding took, a chunk.
    """

    chunks: int
    fill_s: float | None
    put_ms: float
    start_ms: float
    after_kill_ms: float
    lookup_ms: float
    absent_ms: float
    contains_ms: float
    keys_ms: float
    stats_ms: float
    first_find_ms: float
    find_ms: float
    numbers_ms: float
    alike_ms: float
    delete_ms: float
    find_bytes: int


def timed(call: Callable[[], Any], repeats: int = 1) -> float:
    """Milliseconds of a call, the median."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return round(1000 * median(times), 3)


def engine_of(model: Model, folder: Path) -> Engine:
    return Engine(model, ChunkStore(folder), block_size=BLOCK_SIZE)


def fill(model: Model, folder: Path, n_chunks: int) -> float:
    """Puts chunks; seconds."""
    engine = engine_of(model, folder)
    began = time.perf_counter()

    def put(number: int) -> None:
        text = text_of(number)
        ids = model.tokenize(text, special=False)
        engine.store.put(random_chunk(engine.store, text, ids, engine.fingerprint, seed=number))

    with ThreadPoolExecutor(WRITERS) as writers:
        for _ in writers.map(put, range(n_chunks)):
            pass
    return round(time.perf_counter() - began, 1)


def figures(model: Model, folder: Path, n_chunks: int) -> dict[str, Any]:
    """The figures of one store, taken in a process that opens it first."""
    dice = random.Random(n_chunks)
    made_by = engine_of(model, folder.parent / "elsewhere").fingerprint
    ids = {number: model.tokenize(text_of(number), special=False)
           for number in dice.sample(range(n_chunks), min(n_chunks, REPEATS))}  # fmt: skip
    absent = model.tokenize(text_of(n_chunks + 1), special=False)
    started_ms = start_ms(folder, made_by)
    store = ChunkStore(folder)
    numbers = iter(list(ids) * 2)

    def look_up(of: list[int]) -> None:
        try:
            store.open(store.key(made_by, of), made_by, of).close()
        except CacheMiss as miss:
            assert miss.reason == "absent" and of is absent, miss

    found = {
        "start_ms": started_ms,
        "lookup_ms": timed(lambda: look_up(ids[next(numbers)]), len(ids)),
        "absent_ms": timed(lambda: look_up(absent), len(ids)),
        "contains_ms": timed(lambda: store.contains(store.key(made_by, absent), made_by), len(ids)),
        "stats_ms": timed(store.stats),
        "keys_ms": timed(lambda: store.keys(made_by)),
    }
    found |= finding(model, folder, dice, n_chunks)
    new = iter(range(n_chunks + 10, n_chunks + 10 + REPEATS))
    put: list[str] = []

    def put_one() -> None:
        text = text_of(next(new))
        of = model.tokenize(text, special=False)
        chunk = random_chunk(store, text, of, made_by, seed=1)
        put.append(chunk.key)
        store.put(chunk)

    found["put_ms"] = timed(put_one, REPEATS // 2)
    keys = iter(put)
    found["delete_ms"] = timed(lambda: store.delete(next(keys)), len(put))
    return found


def put_and_die(model: Model, folder: Path) -> None:
    """A writer that does not say goodbye."""
    engine = engine_of(model, folder)
    ids = model.tokenize(text_of(0), special=False)
    engine.store.put(random_chunk(engine.store, text_of(0), ids, engine.fingerprint, seed=0))
    die()


def start_ms(folder: Path, made_by: Fingerprint) -> float:
    """Opening the store, and a look-up in vain."""

    def begin() -> None:
        store = ChunkStore(folder)
        store.contains(store.key(made_by, [1]), made_by)
        store.text("0" * 32)

    return timed(begin)


def finding(model: Model, folder: Path, dice: random.Random, n_chunks: int) -> dict[str, Any]:
    """Times of finding chunks in prompts, and the memory that it took."""
    engine = engine_of(model, folder)
    held = [text_of(number) for number in dice.sample(range(n_chunks), 5)]
    prompt = "\n\n".join([*held, "What may be torn out? " * 70])
    dates = " ".join(f"[[{n}, 20240101]]" for n in range(1300))
    alike = "\n\n".join(f"{text_of(0)[:36]} that nobody kept, {n}." for n in range(100))
    before = resident_bytes()
    first = timed(lambda: engine.found_in(prompt))
    memory = resident_bytes() - before
    assert sorted(engine.found_in(prompt)) == sorted(held)
    return {
        "first_find_ms": first,
        "find_ms": timed(lambda: engine.found_in(prompt), 20),
        "numbers_ms": timed(lambda: engine.found_in(dates), 3),
        "alike_ms": timed(lambda: engine.found_in(alike), 3),
        "find_bytes": max(0, memory) // n_chunks,
    }


def measure(base: Path, n_chunks: int) -> Row:
    """One row."""
    model, folder = tiny_model(), base / f"{n_chunks}-chunks"
    torch.set_grad_enabled(False)
    # in a process of its own, as it has threads
    is_new = not folder.exists()
    timeout_s = 7200.0
    fill_s = (
        in_fresh_process(partial(fill, model, folder, n_chunks), base, timeout_s)
        if is_new
        else None
    )
    made_by = engine_of(model, base / "elsewhere").fingerprint
    finish(start(partial(put_and_die, model, folder), base / "errors.txt"))
    after_kill_ms = in_fresh_process(partial(start_ms, folder, made_by), base)
    found = in_fresh_process(partial(figures, model, folder, n_chunks), base, timeout_s)
    found["after_kill_ms"] = after_kill_ms
    return Row(chunks=n_chunks, fill_s=fill_s, **found)


def main() -> None:
    """The table, on standard output: a column for each store."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store_size")
    parser.add_argument("--chunks", default="1000,100000", help="numbers of chunks")
    parser.add_argument("--dir", type=Path, help="folder of the stores, else a temporary one")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    single_thread()
    with tempfile.TemporaryDirectory() as temporary:
        base = chosen.dir or Path(temporary)
        base.mkdir(parents=True, exist_ok=True)
        rows = [asdict(measure(base, int(number))) for number in chosen.chunks.split(",")]
    cells = [
        {"figure": name, **{f"{row['chunks']} chunks": row[name] for row in rows}}
        for name in rows[0]
        if name != "chunks"
    ]
    report("store size", cells, chosen.json)


if __name__ == "__main__":
    main()
