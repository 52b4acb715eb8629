"""How much faster answers are decoded together than one by one.

    python -m benchmarks.batched_decoding --layers 6 --dtype bfloat16 --steps 8

Answers to different questions about the same chunks. A step is timed alone, for each number of
answers in turn, over working caches that first passes have left; and all answers of a round are
asked for at once and one after another, first passes and all.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from tqdm.auto import tqdm

from benchmarks.models import Words, build
from benchmarks.run_settings import hardware
from samkv_integrations import Engine
from samkv_integrations.cli.tables import markdown_table as table
from samkv_integrations.engine.answer_settings import AnswerSettings
from samkv_integrations.engine.decode import Decoder, decode
from samkv_integrations.engine.first_token import first_token
from samkv_integrations.figures import to_json
from samkv_integrations.prompt import rag_prompt

TOKEN = 17
"""What every answer goes on with: it is a matter of time alone."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Times of a method with some answers at once.

    step_ms: of a step that decodes them all. speed_up: tokens a second of that, over those of one
    answer in the same round. whole_s: from the first question to the last token, all asked at once.
    whole_ratio: that over the same one by one.
    """

    method: str
    answers: int
    step_ms: float
    tokens_per_s: float
    speed_up: float
    whole_s: float
    whole_ratio: float


def decoders(engine: Engine, prompts: Sequence[str], method: str, n_steps: int) -> list[Decoder]:
    """Answers whose first token is there."""
    settings = AnswerSettings.of(method=method, on_miss="text")

    def begin(prompt: str) -> Decoder:
        with engine.resolve(prompt) as resolved, torch.inference_mode():
            first = first_token(engine.request(resolved, settings, n_steps))
        return Decoder(engine.model, first.cache, first.layout.n_tokens)

    return [begin(prompt) for prompt in prompts]


def step_seconds(these: Sequence[Decoder]) -> float:
    """Of one step."""
    began = time.perf_counter()
    with torch.inference_mode():
        decode(these, [TOKEN] * len(these))
    return time.perf_counter() - began


def whole_seconds(engine: Engine, prompts: Sequence[str], method: str, n_threads: int) -> float:
    """Of all answers, so many of them asked at a time."""
    began = time.perf_counter()
    with ThreadPoolExecutor(n_threads) as threads:
        asked = [
            threads.submit(engine.generate, prompt, method=method, max_new_tokens=32)
            for prompt in prompts
        ]
        for each in asked:
            each.result()
    return time.perf_counter() - began


def measure(engine: Engine, prompts: Sequence[str], method: str, steps: int) -> list[Row]:
    """The rows of a method, with one answer up to as many as there are prompts."""
    numbers = [n for n in (1, 2, 4, 8, 16) if n <= len(prompts)]
    begun = decoders(engine, prompts, method, (steps + 1) * len(numbers))
    times: dict[int, list[float]] = {n: [] for n in numbers}
    for step in tqdm(range(steps + 1), desc=method, leave=False):
        for n in numbers:
            seconds = step_seconds(begun[:n])
            if step:  # the first one warms up
                times[n].append(seconds)
    del begun
    rows = []
    for n in numbers:
        speed_ups = [n * alone / own for alone, own in zip(times[1], times[n], strict=True)]
        together = whole_seconds(engine, prompts[:n], method, n)
        one_by_one = whole_seconds(engine, prompts[:n], method, 1)
        rows.append(
            Row(
                method=method,
                answers=n,
                step_ms=1000 * median(times[n]),
                tokens_per_s=n / median(times[n]),
                speed_up=median(speed_ups),
                whole_s=together,
                whole_ratio=together / one_by_one,
            )
        )
    return rows


def main() -> None:
    """The table, on standard output."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batched_decoding")
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16, help="that are timed, of each number")
    parser.add_argument("--methods", default="reuse,samkv-guided")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    model = build(
        chosen.shape, layers=chosen.layers, dtype=chosen.dtype, device=chosen.device, seed=0,
        window=chosen.chunks * chosen.chunk_tokens + 1024,
    )  # fmt: skip
    words = Words(model, 0)
    chunks = [words.text(chosen.chunk_tokens) for _ in range(chosen.chunks)]
    prompts = [rag_prompt(words.text(12) + "?", chunks) for _ in range(chosen.answers)]
    assert all(isinstance(prompt, str) for prompt in prompts)
    engine = Engine(model)
    engine.cache_chunks(chunks)
    rows = [
        row
        for method in chosen.methods.split(",")
        for row in measure(engine, [str(prompt) for prompt in prompts], method, chosen.steps)
    ]
    if chosen.json:
        text = to_json(
            "batched decoding", model.name, [asdict(row) for row in rows],
            {"hardware": hardware(model), "dtype": model.dtype_name},
        )  # fmt: skip
        chosen.json.write_text(f"{text}\n", encoding="utf-8")
    cells = [
        [r.method, str(r.answers), f"{r.step_ms:.0f}", f"{r.tokens_per_s:.1f}",
         f"{r.speed_up:.2f}", f"{r.whole_s:.1f}", f"{r.whole_ratio:.2f}"]
        for r in rows
    ]  # fmt: skip
    columns = ("method", "answers", "step, ms", "tokens/s", "speed-up", "all, s", "of one by one")
    sys.stdout.write(table(columns, cells, left=1) + "\n")


if __name__ == "__main__":
    main()
