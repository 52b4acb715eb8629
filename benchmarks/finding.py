"""How long it takes to find chunks in prompts of 100,000 characters, hostile ones among them.

    python -m benchmarks.finding --chunks 100000

The texts and token ids of that many chunks are put into the index of a store, without caches. Then
prompts are searched for them. What a prompt costs anyway, tokenising it, is shown beside.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median

from samkv_integrations.prompt.layout import find_runs
from samkv_integrations.runtimes.transformers.loading import load_tokenizer
from samkv_integrations.store.chunk import Fingerprint
from samkv_integrations.store.index import Entry, Index, IndexedChunks
from samkv_integrations.store.windows import ChunkIndex

SECRET = bytes(32)
MADE_BY = Fingerprint(
    model="", weights="", config="", tokenizer="", dtype="float32", rope="", n_layers=1, n_heads=1,
    n_kv_heads=1, head_dim=1, prefix="", block_size=1, n_init=0, n_local=0, store_bits=8,
)  # fmt: skip
SHARED = (
    "This document is the property of the archive and may be copied with this notice only, in full "
    "or in part, by anybody who names its source. "
)
WORDS = (
    "the of and to in a is that it was for on are as with his they at be this from have or by one "
    "had not but what all were when we there can an your which their said if do will each about how"
).split()


def text_of(number: int) -> str:
    """A chunk of some 200 tokens, a third of which all chunks have in common."""
    dice = random.Random(number)
    return SHARED * 2 + " ".join(
        dice.choice(WORDS) + (str(dice.randrange(9)) if dice.random() < 0.1 else "")
        for _ in range(140)
    )


def prompts(n_chunks: int, size: int) -> Iterator[tuple[str, str]]:
    """What is asked, by name; each of ``size`` characters."""
    dice = random.Random(0)

    def filled(part: Callable[[], str]) -> str:
        text = ""
        while len(text) < size:
            text += part()
        return text[:size]

    yield "chunks of the store", filled(lambda: f"{text_of(dice.randrange(n_chunks))}\n\n")
    yield (
        "chunks, quoted",
        filled(lambda: text_of(dice.randrange(n_chunks)).replace(" the ", "\n> the ")),
    )
    yield "none of them", filled(lambda: dice.choice(WORDS) + " ")
    yield "what all chunks share", filled(lambda: SHARED)
    yield (
        "pieces of 20 characters",
        filled(lambda: text_of(dice.randrange(n_chunks))[dice.randrange(900) :][:20]),
    )
    yield "one letter", "a" * size
    yield "digits", filled(lambda: str(dice.random()))
    yield (
        "every second word of a chunk",
        filled(lambda: " ".join(text_of(dice.randrange(n_chunks)).split()[::2]) + " "),
    )


class Caches:
    """Stands for the chunk files of a store."""

    def __init__(self, entries: Callable[[], Iterable[Entry]]) -> None:
        self.entries = entries

    def is_gone(self, digest: str, key: str) -> bool:
        return False

    def remove(self, digest: str, key: str) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--characters", type=int, default=100_000)
    parser.add_argument("--model", default="builtin", help="whose tokenizer")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model)

    def ids_of(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def entries() -> Iterator[Entry]:
        for number in range(args.chunks):
            text = text_of(number)
            yield Entry(
                fingerprint=MADE_BY, key=f"{number:032x}", namespace="", text=text,
                token_ids=ids_of(text), n_bytes=0, used_at=0.0,
            )  # fmt: skip

    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        index = Index(Path(folder), Caches(entries), SECRET)
        index.keys("", None)
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        print(
            f"{args.chunks} chunks: made in {time.perf_counter() - began:.0f} s, "
            f"{size / args.chunks:.0f} bytes a chunk"
        )
        known: ChunkIndex = IndexedChunks(index, "", MADE_BY.digest)
        print(f"{'prompt':30s} {'tokens':>8s} {'tokenise s':>11s} {'find s':>8s} in runs")
        for name, prompt in prompts(args.chunks, args.characters):
            began = time.perf_counter()
            ids = ids_of(prompt)
            tokenise_s, seconds = time.perf_counter() - began, []
            for _ in range(5):
                began = time.perf_counter()
                found = find_runs(ids, [known])
                seconds.append(time.perf_counter() - began)
            in_runs = sum(len(run) for each in found for run in each.runs)
            print(
                f"{name:30s} {len(ids):8d} {tokenise_s:11.3f} {median(seconds):8.3f} "
                f"{in_runs / len(ids):.3f}"
            )


if __name__ == "__main__":
    main()
