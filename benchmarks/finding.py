"""How long it takes to find chunks in prompts by their text, by the number of chunks in a store.

    python -m benchmarks.finding --chunks 1000 10000 100000 [--dir FOLDER] [--json FILE]

No model is loaded: the store is given texts alone. Without ``--dir`` it is one in memory.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from samkv_integrations.bench.markdown import table
from samkv_integrations.cache.base import Store
from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.cache.fingerprint import Fingerprint
from samkv_integrations.cache.memory import MemoryStore
from samkv_integrations.figures import to_json
from samkv_integrations.model.quoting import RenderedPrompt
from samkv_integrations.prompt.finder import KnownTexts
from samkv_integrations.prompt.handles import MAX_ISSUED, Handles
from samkv_integrations.prompt.split import split_prompt

WORDS_OF_A_CHUNK = 120
CHARS_OF_A_PROMPT = 16_384
"""Some 4,096 tokens of English."""
LONG = 5_000_000
LOOK_ALIKES = 1_000
REPEATS = 5
SLOW_MS = 200
"""What takes longer is asked once more only."""

MADE_BY = Fingerprint(
    model="none", weights="w", config="c", tokenizer="t", dtype="float32", rope="r", n_layers=1,
    n_heads=1, n_kv_heads=1, head_dim=8, prefix="", block_size=8, n_init=1, n_local=1, store_bits=4,
)  # fmt: skip

BOILERPLATE = {
    "none": "",
    "24 characters": "Confidential. Do not share",
    "200 characters": "This page is confidential and may not be shown to anybody. " * 4,
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """How long one prompt takes.

    begins: what all chunks begin with. first_ms: the first prompt of a process, which learns how
    the stored texts begin. ms: each later one. bytes_each: what a chunk takes in this process.
    """

    chunks: int
    begins: str
    prompt: str
    chars: int
    found: int
    first_ms: float
    ms: float
    bytes_each: int


class Texts:
    """Paragraphs of made-up words, the same ones for the same number."""

    def __init__(self) -> None:
        letters = random.Random(0)
        self._words = [
            "".join(letters.choices("abcdefghijklmnoprstuvw", k=letters.randint(2, 9)))
            for _ in range(5_000)
        ]

    def __call__(self, number: int, begins: str = "", n_words: int = WORDS_OF_A_CHUNK) -> str:
        return (
            f"{begins} {' '.join(random.Random(number).choices(self._words, k=n_words))}.".strip()
        )


def filled(store: Store, n_chunks: int, begins: str, text: Texts) -> Store:
    """The store with the texts of so many chunks."""
    for number in range(n_chunks):
        store.put_text(f"{number:032x}", MADE_BY, text(number, begins))
    return store


def prompts(n_chunks: int, begins: str, text: Texts) -> Iterator[tuple[str, str]]:
    """Prompts by name."""
    held = [text(number, begins) for number in range(min(8, n_chunks))]
    rest = CHARS_OF_A_PROMPT - sum(map(len, held))
    yield "4,096 tokens, 8 chunks", "\n\n".join([*held, text(n_chunks, n_words=rest // 7)])
    alike = [text(n_chunks + number, begins) for number in range(LOOK_ALIKES)]
    yield f"{LOOK_ALIKES:,} that begin alike", "\n\n".join(alike)
    words = text(n_chunks, n_words=LONG // 7)
    yield "5 MB of words", words
    if begins:
        yield "5 MB of beginnings", f"{begins} and so on. " * (LONG // (len(begins) + 12))
    yield "1.1 kB of brackets", "[[1, 20240101]] " * 70
    yield "5 MB of brackets", "[[1, 20240101]] " * (LONG // 16)


def timed_ms(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return median(times) * 1000


def measure(store: Store, n_chunks: int, begins: str, text: Texts) -> Iterator[Row]:
    """A row for each prompt."""
    handles = Handles()
    for number in range(MAX_ISSUED):
        handles.issue(str(number))

    def ask(known: KnownTexts, prompt: str) -> int:
        spans = [*handles.find(prompt), *known.find(prompt)]
        for piece in split_prompt(RenderedPrompt(prompt), spans):
            handles.require_whole(piece.text)
            handles.require_live(piece.text)
        return len(spans)

    for name, prompt in prompts(n_chunks, BOILERPLATE[begins], text):
        known = KnownTexts(store, lambda: MADE_BY, str)
        tracemalloc.start()
        known.find("x")
        bytes_each = tracemalloc.get_traced_memory()[0] // n_chunks
        tracemalloc.stop()
        known = KnownTexts(store, lambda: MADE_BY, str)
        first_ms = timed_ms(lambda known=known, prompt=prompt: ask(known, prompt), 1)
        repeats = 1 if first_ms > SLOW_MS else REPEATS
        yield Row(
            chunks=n_chunks,
            begins=begins,
            prompt=name,
            chars=len(prompt),
            found=len(known.find(prompt)),
            first_ms=round(first_ms, 2),
            ms=round(timed_ms(lambda known=known, prompt=prompt: ask(known, prompt), repeats), 2),
            bytes_each=bytes_each,
        )


def main() -> None:
    """The table, on standard output."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.finding")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--begins", nargs="+", choices=BOILERPLATE, default=list(BOILERPLATE))
    parser.add_argument("--dir", type=Path, help="a new folder for stores on disk")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    text, rows = Texts(), []
    for begins in chosen.begins:
        for number in chosen.chunks:
            folder = chosen.dir and chosen.dir / f"{number}-{begins[:3].strip()}"
            store: Store = ChunkStore(folder) if folder else MemoryStore()
            began = time.perf_counter()
            filled(store, number, BOILERPLATE[begins], text)
            seconds = time.perf_counter() - began
            sys.stderr.write(f"{number} texts, {begins}: stored in {seconds:.1f} s\n")
            for row in measure(store, number, begins, text):
                rows.append(row)
                sys.stderr.write(f"{row}\n")
    if chosen.json:
        rows_of = [asdict(row) for row in rows]
        chosen.json.write_text(f"{to_json('finding', None, rows_of)}\n", encoding="utf-8")
    cells = [[str(value) for value in asdict(row).values()] for row in rows]
    sys.stdout.write(table(tuple(asdict(rows[0])), cells, left=3) + "\n")


if __name__ == "__main__":
    main()
