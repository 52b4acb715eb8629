"""How much sooner a turn of a conversation is answered whose earlier turns are held in memory.

    python -m benchmarks.held_beginning --layers 6 --dtype bfloat16 --rounds 7

A prompt is a history, chunks that are cached, and a question. The turn before had the same history
but for its last tokens, which are that turn's question and answer. Each turn is asked of an engine
that holds the turn before, and of one that holds nothing, in turns and in one process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from tqdm.auto import tqdm

from benchmarks.models import Words, build
from benchmarks.run_settings import hardware
from samkv_integrations import Engine
from samkv_integrations.cache.memory import MemoryStore
from samkv_integrations.cli.tables import markdown_table as table
from samkv_integrations.engine.report import Report
from samkv_integrations.figures import to_json


@dataclass(frozen=True, kw_only=True)
class Row:
    """A method's first token. ratio: median over rounds of that with over that without.

    held_tokens: of the prompt's. cold_s, warm_s: medians, without and with what is held.
    """

    method: str
    ran: str
    prompt_tokens: int
    held_tokens: int
    cold_s: float
    warm_s: float
    ratio: float


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Two turns of a conversation, each with its own question about the same chunks."""

    before: str
    now: str
    chunks: Sequence[str]

    @classmethod
    def of(cls, words: Words, history: int, new: int, n_chunks: int, chunk_tokens: int) -> Turns:
        """Random words; ``history`` tokens before the chunks, ``new`` of them new."""
        chunks = [words.text(chunk_tokens) for _ in range(n_chunks)]
        earlier = words.text(history - new)
        documents = "\n\n".join(chunks)
        before, now = (
            f"{said}\n\n{documents}\n\n{words.text(12)}?"
            for said in (earlier, f"{earlier} {words.text(new)}")
        )
        return cls(before=before, now=now, chunks=chunks)


def first_token(engine: Engine, prompt: str, chunks: Sequence[str], method: str) -> Report:
    """What it cost."""
    return engine.generate(prompt, chunks, method=method, max_new_tokens=1).report


def measure(engines: tuple[Engine, Engine], turns: Turns, method: str, rounds: int) -> Row:
    """engines: one that holds nothing, and one that does."""
    cold, warm = engines
    pairs: list[tuple[Report, Report]] = []
    for round_ in tqdm(range(rounds + 1), desc=method, leave=False):
        warm.prefixes.clear()
        first_token(warm, turns.before, turns.chunks, method)
        order = engines if round_ % 2 else (warm, cold)
        reports = {engine: first_token(engine, turns.now, turns.chunks, method) for engine in order}
        if round_:  # the first one warms up
            pairs.append((reports[cold], reports[warm]))
    last = pairs[-1][1]
    return Row(
        method=method,
        ran=last.ran,
        prompt_tokens=last.prompt_tokens,
        held_tokens=last.prefix_tokens,
        cold_s=median(without.ttft_s for without, _ in pairs),
        warm_s=median(held.ttft_s for _, held in pairs),
        ratio=median(held.ttft_s / without.ttft_s for without, held in pairs),
    )


def main() -> None:
    """The table, on standard output."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.held_beginning")
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--history", type=int, default=1000, help="tokens before the chunks")
    parser.add_argument("--new", type=int, default=100, help="of them, since the turn before")
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--methods", default="recompute,reuse,epic,samkv-guided,auto")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    model = build(
        chosen.shape, layers=chosen.layers, dtype=chosen.dtype, device=chosen.device, seed=0,
        window=chosen.history + chosen.chunks * chosen.chunk_tokens + 1024,
    )  # fmt: skip
    words, store = Words(model, 0), MemoryStore()
    turns = Turns.of(words, chosen.history, chosen.new, chosen.chunks, chosen.chunk_tokens)
    engines = Engine(model, store, prefix_bytes=0), Engine(model, store)
    engines[0].cache_chunks(turns.chunks)
    rows = [measure(engines, turns, name, chosen.rounds) for name in chosen.methods.split(",")]
    if chosen.json:
        text = to_json(
            "held beginning", model.name, [asdict(row) for row in rows],
            {"hardware": hardware(model), "dtype": model.dtype_name},
        )  # fmt: skip
        chosen.json.write_text(f"{text}\n", encoding="utf-8")
    cells = [
        [r.method, r.ran, str(r.prompt_tokens), str(r.held_tokens), f"{1000 * r.cold_s:.0f}",
         f"{1000 * r.warm_s:.0f}", f"{r.ratio:.2f}"]
        for r in rows
    ]  # fmt: skip
    columns = ("method", "ran", "prompt", "held", "nothing held, ms", "held, ms", "ratio")
    sys.stdout.write(table(columns, cells, left=2) + "\n")


if __name__ == "__main__":
    main()
