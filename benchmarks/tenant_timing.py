"""Whether time tells a tenant that another one has cached a text, or had the same conversation.

    python -m benchmarks.tenant_timing --pairs 200

One tenant asks questions about texts in one store: texts that nobody has cached, that another
tenant has, and, so that it is seen what would be told, that the tenant itself has. Nothing is kept
of a question, so each is as new as the first; but before a next turn, whoever has cached the text
asks the first one. The three questions of a pair are asked in random order, one right after the
other.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from scipy.stats import wilcoxon
from tqdm.auto import tqdm

from benchmarks.commands import markdown_table as table
from benchmarks.run_settings import hardware
from samkv_integrations import ChunkStore, Engine
from samkv_integrations.cli.formatting import to_json
from samkv_integrations.prompt import rag_prompt
from samkv_integrations.runtimes.transformers import load_model

BUILTIN = "builtin"
NOBODY, OTHER, SELF = "nobody", "another tenant", "the tenant itself"
NEXT_TURN = "next turn"
WARM_UP = 10
"""Pairs that do not count."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Times of texts that somebody has cached, beside those of texts that nobody has.

    median_ms, nobody_ms: medians. ratio: median of the pairs' ratios. faster: share of the pairs in
    which the cached text was the faster one. p: of Wilcoxon's signed-rank test of the pairs, that
    there is no difference.
    """

    what: str
    cached_by: str
    pairs: int
    median_ms: float
    nobody_ms: float
    ratio: float
    faster: float
    p: float


def texts(number: int, words: int) -> list[str]:
    """Texts of the same length that share neither beginning nor title."""
    drawn = random.Random(0)
    letters = "abcdefghiklmnoprstuvw"
    vocabulary = ["".join(drawn.choices(letters, k=5)) for _ in range(2_000)]
    return [
        f"[{number:06d}] " + " ".join(drawn.choices(vocabulary, k=words))
        for number in drawn.sample(range(10**5, 10**6), number)
    ]


def measure(folder: Path, pairs: int, words: int, method: str) -> list[Row]:
    """The rows of one run, in a store below ``folder``."""
    model = load_model(BUILTIN, device="cpu", dtype="float32")
    tenant, other = (
        Engine(model, ChunkStore(folder / "kv", namespace=name), method=method)
        for name in ("tenant", "other")
    )
    drawn = texts(3 * (pairs + WARM_UP), words)
    of_group = {group: drawn[place::3] for place, group in enumerate((NOBODY, OTHER, SELF))}
    other.cache_chunks(of_group[OTHER])
    tenant.cache_chunks(of_group[SELF])

    def answer(prompt: str) -> object:
        return tenant.generate(prompt, max_new_tokens=1, on_miss="text")

    timed: dict[str, Callable[[str], object]] = {
        "recognising": tenant.found_in,
        "first token": answer,
        NEXT_TURN: lambda prompt: answer(f"{prompt} Nobody knows.\nQuestion: And why?\nAnswer:"),
    }
    times = {what: {group: [] for group in of_group} for what in timed}
    order = random.Random(1)
    for place in tqdm(range(pairs + WARM_UP), desc="asking"):
        for what, ask in timed.items():
            for group in order.sample(list(of_group), len(of_group)):
                prompt = rag_prompt("Who was it?", [of_group[group][place]])
                tenant.sequences.clear()
                asking = {OTHER: other, SELF: tenant}.get(group)
                if what == NEXT_TURN and asking is not None:
                    asking.generate(prompt, max_new_tokens=1, on_miss="text")
                times[what][group].append(_seconds(partial(ask, prompt)))
    return [
        _row(what, group, of_what[group][WARM_UP:], of_what[NOBODY][WARM_UP:])
        for what, of_what in times.items()
        for group in (OTHER, SELF)
    ]


def _seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _row(what: str, group: str, cached: list[float], nobody: list[float]) -> Row:
    both = list(zip(cached, nobody, strict=True))
    return Row(
        what=what,
        cached_by=group,
        pairs=len(both),
        median_ms=1000 * median(cached),
        nobody_ms=1000 * median(nobody),
        ratio=median(a / b for a, b in both),
        faster=sum(a < b for a, b in both) / len(both),
        p=float(wilcoxon([a - b for a, b in both]).pvalue),
    )


def main() -> None:
    """The table, on standard output."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tenant_timing")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--words", type=int, default=60, help="of each text")
    parser.add_argument("--method", default="reuse")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), chosen.pairs, chosen.words, chosen.method)
    if chosen.json:
        more = {"hardware": hardware(load_model(BUILTIN, device="cpu", dtype="float32"))}
        text = to_json("tenant timing", BUILTIN, [asdict(row) for row in rows], more)
        chosen.json.write_text(f"{text}\n", encoding="utf-8")
    cells = [
        [r.what, r.cached_by, str(r.pairs), f"{r.median_ms:.2f}", f"{r.nobody_ms:.2f}",
         f"{r.ratio:.3f}", f"{100 * r.faster:.0f} %", f"{r.p:.3f}"]
        for r in rows
    ]  # fmt: skip
    columns = ("what", "cached by", "pairs", "median, ms", "nobody's, ms", "ratio", "faster", "p")
    sys.stdout.write(table(columns, cells, left=2) + "\n")


if __name__ == "__main__":
    main()
