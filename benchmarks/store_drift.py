"""Many questions to one engine over one store: do time, memory and open files stay as they were?

    python -m benchmarks.store_drift --questions 10000

A tiny model with random weights, so that what is not the model weighs. Every prompt holds three
documents as text, which are found in it; a third of them are announced before. Every 20th question
a document is forgotten and a new one ingested, so that the store changes and does not grow. A row
is a tenth of the questions.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.models import Words
from benchmarks.store_parts import (
    open_descriptors,
    report,
    resident_bytes,
    single_thread,
    tiny_model,
)
from samkv_integrations import ChunkStore, Engine

N_DOCUMENTS = 200
DOCUMENT_TOKENS = 24
EVERY = 20
PARTS = 10


@dataclass(frozen=True, kw_only=True)
class Row:
    """A part of the questions. descriptors: files open after it. found: of the chunks given."""

    questions: str
    median_ms: float
    slowest_ms: float
    memory_mb: float
    descriptors: int
    threads: int
    store_files: int
    found: float
    hits: float


def parts(folder: Path, number: int, seed: int) -> Iterator[Row]:
    """Asks ``number`` questions; a row for each tenth."""
    dice = random.Random(seed)
    engine = Engine(tiny_model(), ChunkStore(folder / "kv"), method="reuse", block_size=8)
    words = Words(engine.model, seed)
    documents = [words.text(DOCUMENT_TOKENS) for _ in range(N_DOCUMENTS)]
    engine.cache_chunks(documents)
    for first in range(0, number, max(1, number // PARTS)):
        times, found, reused = [], 0, 0
        asked = min(max(1, number // PARTS), number - first)
        for question in range(asked):
            if question % EVERY == EVERY - 1:
                engine.forget([documents.pop(dice.randrange(N_DOCUMENTS))])
                documents.append(words.text(DOCUMENT_TOKENS))
                engine.cache_chunks(documents[-1:])
            chosen = dice.sample(documents, 3)
            began = time.perf_counter()
            if question % 3 == 0:
                engine.announce(chosen)
            prompt = "\n\n".join([*chosen, words.text(8)])
            given = engine.generate(prompt, max_new_tokens=4, on_miss="compute").report
            times.append(time.perf_counter() - began)
            found, reused = found + given.found, reused + given.reused
        yield Row(
            questions=f"{first + 1} to {first + asked}",
            median_ms=round(1000 * median(times), 2),
            slowest_ms=round(1000 * max(times), 1),
            memory_mb=round(resident_bytes() / 1e6, 1),
            descriptors=open_descriptors(),
            threads=len(list(Path("/proc/self/task").iterdir())),
            store_files=sum(file.is_file() for file in folder.rglob("*")),
            found=round(found / (3 * asked), 4),
            hits=round(reused / (3 * asked), 4),
        )


def main() -> None:
    """The table, on standard output."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store_drift")
    parser.add_argument("--questions", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="folder to work in, else a temporary one")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    single_thread()
    with tempfile.TemporaryDirectory(dir=chosen.dir) as folder:
        rows = [asdict(row) for row in parts(Path(folder), chosen.questions, chosen.seed)]
    report("store drift", rows, chosen.json)


if __name__ == "__main__":
    main()
