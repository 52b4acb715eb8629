"""Processes that ingest, ask and delete over one folder with too little room, and are killed.

    python -m benchmarks.store_soak --minutes 10

Every process has the built-in model and an engine of its own over one store, whose budget is a
third of what all documents take. Each does at random what a service does: it ingests documents,
asks questions, deletes documents, looks at the store. Processes are killed by SIGKILL and replaced
all the time. Every answer is compared with that of an engine in memory that has all chunks cached:
an evicted chunk that is computed again has the same entries. The size of the folder's chunk files
is read again and again.

At the end all are killed. A new process asks every question, deletes every document and collects
garbage; what is in the folder then is left over.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from benchmarks.datasets import load
from benchmarks.store_parts import (
    Violation,
    chunk_files,
    files_in,
    in_fresh_process,
    kill,
    names,
    report,
    single_thread,
    start,
    strangers_in,
)
from samkv_integrations import ChunkStore, Engine, MemoryStore
from samkv_integrations.errors import StoreError
from samkv_integrations.prompt import rag_prompt
from samkv_integrations.runtimes.transformers import Model, load_model
from samkv_integrations.store import upkeep

METHOD = "reuse"
"""Its answers follow from the chunks' caches alone, and every entry of them is read."""
MAX_TOKENS = 8
MARGIN = 0.02
"""Least distance of the two likeliest tokens at every step of an expected answer. Chunks that are
computed in batches of other chunks differ by 0.0001 and less."""
BLOCK_SIZE = 8
SAMPLE_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question, the texts of its chunks, and its answer by an engine that has them all."""

    prompt: Any
    documents: tuple[str, ...]
    answer: str


@dataclass(frozen=True, kw_only=True)
class World:
    """What all processes share."""

    folder: Path
    seed: int
    model: Model
    asked: Sequence[Asked]
    budget: int

    @cached_property
    def documents(self) -> list[str]:
        return sorted({text for one in self.asked for text in one.documents})

    @property
    def kv(self) -> Path:
        return self.folder / "kv"

    @property
    def errors(self) -> Path:
        return self.folder / "errors.txt"

    @property
    def journal(self) -> Path:
        return self.folder / "journal.jsonl"

    def engine(self) -> Engine:
        store = ChunkStore(self.kv, max_bytes=self.budget)
        return Engine(self.model, store, block_size=BLOCK_SIZE)


def questions(model: Model, number: int, seed: int) -> tuple[list[Asked], int]:
    """Questions whose answers are not close calls, and the bytes that all their chunks take."""
    dice = random.Random(seed)
    sources = load(kinds=["single-hop"])[: max(2, number // 4)]
    texts = sorted({text for source in sources for text in source.documents})
    engine = Engine(model, MemoryStore(), block_size=BLOCK_SIZE)
    engine.cache_chunks(texts)
    found: list[Asked] = []
    while len(found) < number:
        source = dice.choice(sources)
        chosen = tuple(dice.sample(texts, 3) + dice.sample(source.documents, 1))
        if len(set(chosen)) < len(chosen):
            continue
        prompt = rag_prompt(source.question, chosen, chat=True)
        answer = engine.generate(prompt, chosen, method=METHOD, max_new_tokens=MAX_TOKENS).text
        follow = model.tokenize(answer, special=False)[:MAX_TOKENS]
        best = engine.logits(prompt, chosen, follow=follow, method=METHOD).topk(2, dim=-1).values
        if float((best[:, 0] - best[:, 1]).min()) > MARGIN:
            found.append(Asked(prompt=prompt, documents=chosen, answer=answer))
    used = {text for one in found for text in one.documents}
    engine.forget([text for text in texts if text not in used])
    return found, engine.store.stats().bytes


# -- a process --------------------------------------------------------------------------------


def ask(engine: Engine, one: Asked, *, is_announced: bool) -> dict[str, Any]:
    """Asks a question; the outcome as a line of the journal."""
    if is_announced:
        engine.announce(one.documents)
    chunks = None if is_announced else one.documents
    began = time.perf_counter()
    answer = engine.generate(
        one.prompt, chunks, method=METHOD, max_new_tokens=MAX_TOKENS, on_miss="compute"
    )
    return {
        "what": "question",
        "is_right": answer.text == one.answer,
        "answer": answer.text,
        "expected": one.answer,
        "found": answer.report.found,
        "reused": answer.report.reused,
        "computed_now": answer.report.computed_now,
        "misses": dict(answer.report.chunk_misses),
        "given": len(one.documents),
        "seconds": time.perf_counter() - began,
    }


def serve(world: World, life: int) -> None:
    """Ingests, asks and deletes, until it is killed."""
    dice = random.Random(f"{world.seed} {life}")
    journal = os.open(world.journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    engine = world.engine()

    def say(**line: Any) -> None:
        os.write(journal, f"{json.dumps(line)}\n".encode())

    while True:
        chance = dice.random()
        if chance < 0.7:
            say(**ask(engine, dice.choice(world.asked), is_announced=dice.random() < 0.5))
        elif chance < 0.85:
            try:
                engine.cache_chunks(dice.sample(world.documents, 5))
                say(what="ingest")
            except StoreError as error:  # named, and the service goes on
                say(what="refused", why=str(error))
        elif chance < 0.95:
            say(what="deletion", chunks=engine.forget(dice.sample(world.documents, 2)))
        elif chance < 0.98:
            engine.store.stats()
            say(what="stats")
        else:
            upkeep.gc(engine.store)
            say(what="gc")


# -- the size of the folder -------------------------------------------------------------------


def _scan(folder: Path) -> dict[tuple[int, int], int]:
    """(inode, time of its last change) -> bytes, of whatever holds a chunk."""
    found = {}
    for root, _, file_names in os.walk(folder):
        for name in file_names:
            if not name.endswith(".safetensors"):
                continue
            try:
                status = os.lstat(os.path.join(root, name))
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                found[status.st_ino, status.st_mtime_ns] = status.st_size
    return found


def bytes_held(folder: Path) -> int:
    """Bytes of the chunk files that were all there at one instant.

    A walk takes a while, in which one file may go and another come. What two walks find was there
    between them. A file being written, which grows, counts with its first size.
    """
    first = _scan(folder)
    inodes = {inode for inode, _ in _scan(folder)}
    return sum(size for (inode, _), size in first.items() if inode in inodes)


# -- the soak ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came of a soak. hit_rate: chunks answered from caches, of those found.

    refused: ingests that the store refused by an error of its own. peak_bytes: of the folder's
    chunk files; over_budget: by how much that exceeds the budget, 0 if it does not;
    largest_chunk: bytes. left_over: what the folder holds after all was deleted and collected.
    """

    minutes: float
    processes: int
    seed: int
    questions: int
    wrong_answers: int
    uncaught_errors: int
    kills: int
    hit_rate: float
    found_rate: float
    ingests: int
    refused: int
    deletions: int
    misses: str
    data_bytes: int
    budget: int
    peak_bytes: int
    over_budget: int
    largest_chunk: int
    samples: int
    left_over: int
    median_question_ms: float

    @property
    def is_as_required(self) -> bool:
        """Nothing wrong, nothing uncaught, nothing left, and the budget kept but for a chunk."""
        wrong = self.wrong_answers + self.uncaught_errors + self.left_over
        return not wrong and self.over_budget <= self.largest_chunk


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What sampling the folder found."""

    peak: int
    largest: int
    samples: int


def run(world: World, seconds: float, processes: int) -> tuple[int, Sizes]:
    """Lets processes serve and be killed; the number of kills, and the sizes seen."""
    dice = random.Random(world.seed)
    lives = iter(range(10**9))
    pids = [start(partial(serve, world, next(lives)), world.errors) for _ in range(processes)]
    end = time.monotonic() + seconds
    kill_at = time.monotonic() + dice.uniform(0.5, 2.5)
    n_kills = peak = largest = samples = 0
    try:
        while time.monotonic() < end:
            peak, samples = max(peak, bytes_held(world.kv)), samples + 1
            largest = max([largest, *chunk_files(world.kv).values()])
            time.sleep(SAMPLE_S)
            if time.monotonic() > kill_at:
                place = dice.randrange(processes)
                n_kills += kill(pids[place]) is None
                pids[place] = start(partial(serve, world, next(lives)), world.errors)
                kill_at = time.monotonic() + dice.uniform(0.5, 2.5)
    finally:
        n_kills += sum(kill(pid) is None for pid in pids)
    return n_kills, Sizes(peak=peak, largest=largest, samples=samples)


def finally_(world: World) -> dict[str, Any]:
    """Asks everything once more, deletes everything; what is wrong, and what is left over."""
    engine = world.engine()
    outcomes = [ask(engine, one, is_announced=False) for one in world.asked]
    engine.forget(world.documents)
    upkeep.gc(engine.store)
    left = [*strangers_in(world.kv), *chunk_files(world.kv)]
    for name in (name for name in files_in(world.kv) if not name.endswith(".tmp")):
        data = (world.kv / name).read_bytes()
        left += [f"{name}: {text[:40]!r}" for text in world.documents if text[:40].encode() in data]
    stats = engine.store.stats()
    if stats.n_chunks or stats.bytes:
        left.append(f"{stats}")
    return {"outcomes": outcomes, "left": left}


def soak(
    folder: Path, *, minutes: float, processes: int, number: int, seed: int
) -> tuple[Row, list[str]]:
    """One row, and what was wrong."""
    model = load_model("builtin", device="cpu", dtype="float32")
    asked, data_bytes = questions(model, number, seed)
    budget = data_bytes // 3
    world = World(folder=folder, seed=seed, model=model, asked=asked, budget=budget)
    n_kills, sizes = run(world, 60 * minutes, processes)
    lines = [json.loads(line) for line in world.journal.read_text("utf-8").splitlines()]
    try:
        last = in_fresh_process(partial(finally_, world), folder / "..")
    except Violation as violation:
        last = {"outcomes": [], "left": [str(violation)]}
    errors = world.errors.read_text("utf-8") if world.errors.exists() else ""
    of = Counter(line["what"] for line in lines)
    outcomes = [line for line in lines if line["what"] == "question"]
    wrong = [line for line in [*outcomes, *last["outcomes"]] if not line["is_right"]]
    misses: Counter[str] = sum((Counter(line["misses"]) for line in outcomes), Counter())
    given, found, reused = (
        sum(line[name] for line in outcomes) for name in ("given", "found", "reused")
    )
    times = sorted(line["seconds"] for line in outcomes)
    row = Row(
        minutes=minutes, processes=processes, seed=seed,
        questions=len(outcomes) + len(last["outcomes"]), wrong_answers=len(wrong),
        uncaught_errors=errors.count("--- process"), kills=n_kills,
        hit_rate=round(reused / max(1, found), 3), found_rate=round(found / max(1, given), 3),
        ingests=of["ingest"], refused=of["refused"], deletions=of["deletion"],
        misses=", ".join(f"{why} {count}" for why, count in sorted(misses.items())),
        data_bytes=data_bytes, budget=budget, peak_bytes=sizes.peak,
        over_budget=max(0, sizes.peak - budget), largest_chunk=sizes.largest,
        samples=sizes.samples, left_over=len(last["left"]),
        median_question_ms=round(1000 * times[len(times) // 2], 1) if times else 0.0,
    )  # fmt: skip
    refused = {line["why"] for line in lines if line["what"] == "refused"}
    return row, [
        *(f"wrong: {line}" for line in wrong[:5]),
        *([f"uncaught: {errors[:4000]}"] if errors else []),
        *([f"left over: {names(last['left'])}"] if last["left"] else []),
        *(f"refused: {why}" for why in sorted(refused)[:3]),
    ]


def main() -> None:
    """The table, on standard output; ends with 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store_soak")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--questions", type=int, default=100, help="different ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="folder to work in, else a temporary one")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    single_thread()
    base = Path(tempfile.mkdtemp(dir=chosen.dir, prefix="store-soak-"))
    folder = base / "soak"
    folder.mkdir()
    row, problems = soak(
        folder, minutes=chosen.minutes, processes=chosen.processes, number=chosen.questions,
        seed=chosen.seed,
    )  # fmt: skip
    sys.stderr.writelines(f"{one}\n" for one in problems)
    cells = [{"figure": name, "value": str(value)} for name, value in asdict(row).items()]
    report("store soak", cells, chosen.json)
    if row.is_as_required:
        shutil.rmtree(base)
    else:
        sys.stderr.write(f"the folder stays: {base}\n")
    sys.exit(not row.is_as_required)


if __name__ == "__main__":
    main()
