"""Whole answers against what others take for them, over prompts of many forms.

    python -m benchmarks answer_grid --quick
    python -m benchmarks answer_grid --runtime llama_cpp --model FILE.gguf --cpu

Every row is a cell: so many chunks of so many tokens, so many other tokens, a share of the chunks
cached, so many new tokens. The ways take turns, with greedy answers of exactly that length; figures
are medians and quartiles of ratios to the anchor in the same round. Where others work too, run it
with OMP_NUM_THREADS=1 and --cpu.

With transformers the anchor is its ``generate``, template and tokenising included on both sides.
With llama.cpp it is the loop of `benchmarks.llama_loop`, likewise, and cells are four cached
chunks, of 512 to 4,096 tokens in all, and the same with nothing cached and one new token.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm.auto import tqdm

from benchmarks.commands import loaded_model
from benchmarks.commands import markdown_table as table
from benchmarks.llama_loop import LlamaLoop
from benchmarks.pairs import Seconds, Spread, ratios, seconds_of
from benchmarks.run_settings import run_of
from samkv_integrations import ChunkStore, Engine
from samkv_integrations.cli.formatting import to_json
from samkv_integrations.prompt import rag_prompt
from samkv_integrations.report import Report
from samkv_integrations.runtimes.base import Runtime
from samkv_integrations.runtimes.llama_cpp.runtime import LlamaCppModel
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.serving.stream import Answer

PARAGRAPHS = Path(__file__).parents[1] / "examples" / "paragraphs"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A form of prompt. others: tokens in no chunk, besides the template and a short question."""

    chunks: int
    chunk_tokens: int
    others: int
    cached: float
    new_tokens: int

    @property
    def n_tokens(self) -> int:
        """Tokens of prompt and answer, the template and the question with 100."""
        return self.chunks * self.chunk_tokens + self.others + self.new_tokens + 100


def cells(*, quick: bool) -> list[Cell]:
    """Those of the whole grid, or one that covers each pair of lengths once."""
    shapes = list(product((2, 5, 10, 20, 40), (40, 150, 300, 600)))
    rest = list(product((0, 300, 1000), (0.0, 0.5, 1.0), (1, 16, 128)))
    if quick:  # 7 and 27 have no common factor, so that neighbours differ in all three
        turns = cycle(rest[7 * n % len(rest)] for n in range(len(rest)))
        found = [(*shape, *next(turns)) for shape in shapes for _ in range(3)]
    else:
        found = [(*shape, *others) for shape, others in product(shapes, rest)]
    return [
        Cell(chunks=n, chunk_tokens=length, others=o, cached=c, new_tokens=new)
        for n, length, o, c, new in found
    ]


def cells_beside_llama_cpp() -> list[Cell]:
    """Cached prompts of 512 to 4,096 tokens with answers of 32 to 256, and first tokens of others.

    The others have no cached chunk.
    """
    lengths = (512, 1024, 2048, 4096)
    return [
        Cell(chunks=4, chunk_tokens=n_tokens // 4, others=0, cached=cached, new_tokens=new)
        for cached, answers in ((1.0, (32, 128, 256)), (0.0, (1,)))
        for n_tokens, new in product(lengths, answers)
    ]


class Texts:
    """Texts of so many tokens from real paragraphs, each of which begins where the last ended."""

    def __init__(self, model: Runtime) -> None:
        files = sorted(PARAGRAPHS.glob("*.txt"))
        text = "\n\n".join(file.read_text(encoding="utf-8").strip() for file in files)
        self._model, self._ids = model, model.tokenize(text, special=False)
        self.at = 0

    def next(self, n_tokens: int) -> str:
        found = [self._ids[(self.at + offset) % len(self._ids)] for offset in range(n_tokens)]
        self.at += n_tokens
        return self._model.detokenize(found).strip()


ANCHOR = "anchor"

Anchor = Callable[[Any, int], object]
"""Answers messages with so many tokens."""


def generate(model: Model) -> Anchor:
    """transformers' own."""

    def answer(messages: Any, new_tokens: int) -> None:  # noqa: ANN401
        with torch.inference_mode():
            ids = model.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            made = model.hf.generate(
                **ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False
            )
            model.tokenizer.decode(made[0, ids["input_ids"].shape[1] :])

    return answer


def loop_of(model: LlamaCppModel) -> Anchor:
    """llama.cpp's own."""
    loop, engine = LlamaLoop(model), Engine(model)

    def answer(messages: Any, new_tokens: int) -> None:  # noqa: ANN401
        ids = model.tokenize_prompt(engine.render(messages))
        model.detokenize(loop.answer(ids, new_tokens))

    return answer


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Seconds of a whole answer, and its report if it is ours."""

    seconds: Seconds
    report: Report | None = None


class Ways:
    """Each way to answer a prompt.

    anchor: the way that others are measured against. calibrated: whether costs are measured, as by
    ``samkv doctor``.
    """

    def __init__(self, model: Runtime, anchor: Anchor, *, calibrated: bool) -> None:
        self.model, self.anchor = model, anchor
        folder = tempfile.mkdtemp(prefix="samkv-grid-")
        self.engine = Engine(model, ChunkStore(Path(folder) / "kv"))
        if calibrated:
            self.engine.calibrate()
        model.end_ids = lambda more: frozenset()  # type: ignore[method-assign]

    def timed(self, way: str, messages: Any, chunks: Sequence[str], new_tokens: int) -> Timed:  # noqa: ANN401
        """An answer by a method, or by the anchor.

        Nothing of an earlier prompt is in memory, and the store stays as it is.
        """
        if way == ANCHOR:
            return Timed(seconds=seconds_of(partial(self.anchor, messages, new_tokens)))
        engine, answers = self.engine, list[Answer]()
        engine.sequences.clear()
        before = set(engine.store.known_keys())

        def answer() -> None:
            answers.append(engine.generate(messages, chunks, method=way, max_new_tokens=new_tokens))

        seconds = seconds_of(answer)
        if made := set(engine.store.known_keys()) - before:
            engine.store.delete(*made)
        return Timed(seconds=seconds, report=answers[0].report)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A cell and a way. ratio: to the anchor, which takes ``anchor_s``. ran: what it turned out."""

    cell: Cell
    way: str
    prompt_tokens: int
    anchor_s: float
    ratio: Spread
    tokens_per_step: float
    ran: str


def measured(
    ways: Ways, texts: Texts, cell: Cell, names: Sequence[str], rounds: int, *, is_cpu: bool = True
) -> list[Row]:
    """A row for each way; is_cpu: of CPU seconds, not of wall time."""
    engine, store = ways.engine, ways.engine.store
    if stored := store.known_keys():
        store.delete(*stored)
    chunks = [texts.next(cell.chunk_tokens) for _ in range(cell.chunks)]
    engine.cache_chunks(chunks[: round(cell.cached * cell.chunks)])
    spent: dict[str, list[Timed]] = {name: [] for name in (ANCHOR, *names)}
    order = random.Random(0)
    for _ in range(rounds):
        others = texts.next(cell.others) + "\n\n" if cell.others else ""
        question, is_chat = "What is said about the year?", ways.model.has_chat_template
        messages = rag_prompt(f"{others}{question}", chunks, chat=is_chat)
        for name in order.sample(list(spent), len(spent)):
            spent[name].append(ways.timed(name, messages, chunks, cell.new_tokens))
    seconds = {name: [each.seconds for each in found] for name, found in spent.items()}
    at = 0 if is_cpu else 1
    return [
        Row(
            cell=cell, way=name, prompt_tokens=report.prompt_tokens,
            anchor_s=median(each.cpu if is_cpu else each.wall for each in seconds[ANCHOR]),
            ratio=ratios(seconds[name], seconds[ANCHOR])[at],
            tokens_per_step=report.tokens_per_step, ran=report.ran,
        )
        for name in names
        if (report := spent[name][-1].report) is not None
    ]  # fmt: skip


def lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    for row in rows:
        cell = row.cell
        yield [
            f"{cell.chunks} x {cell.chunk_tokens}", str(cell.others), f"{cell.cached:.0%}",
            str(cell.new_tokens), str(row.prompt_tokens), f"{row.anchor_s:.2f}", row.way,
            row.ran, f"{row.tokens_per_step:.1f}", str(row.ratio),
        ]  # fmt: skip


def main() -> None:
    """The table, on standard output, and the worst cell of each way."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.answer_grid")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runtime", default="transformers", help="what runs the model")
    parser.add_argument("--dtype", default="float32", help="of a model that transformers runs")
    parser.add_argument("--quick", action="store_true", help="a part that covers all lengths")
    parser.add_argument("--ways", default="auto", help="methods, with ',' between")
    parser.add_argument("--calibrated", action="store_true", help="as after samkv doctor")
    parser.add_argument("--cpu", action="store_true", help="CPU seconds in place of wall time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most-tokens", type=int, default=8000, help="of a prompt")
    parser.add_argument("--least-tokens", type=int, default=0, help="of a prompt")
    parser.add_argument("--skip", type=int, default=0, help="cells to leave out at the beginning")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = loaded_model(args.model, "auto", args.dtype, args.runtime)
    is_llama = args.runtime == "llama_cpp"
    most_tokens = min(args.most_tokens, model.context_window)
    grid = [
        cell
        for cell in (cells_beside_llama_cpp() if is_llama else cells(quick=args.quick))[args.skip :]
        if args.least_tokens <= cell.n_tokens <= most_tokens
    ]
    if not grid:
        parser.error(
            f"no cell after --skip {args.skip} has {args.least_tokens} to {most_tokens} tokens; "
            "give other --least-tokens or --most-tokens, or leave out --quick"
        )
    anchor = loop_of(model) if is_llama else generate(model)
    ways, texts = Ways(model, anchor, calibrated=args.calibrated), Texts(model)
    warm = Cell(chunks=2, chunk_tokens=40, others=0, cached=1.0, new_tokens=2)
    measured(ways, texts, warm, args.ways.split(","), 1)
    rows: list[Row] = []
    settings = {**run_of(model), "calibrated": args.calibrated, "cpu_seconds": args.cpu}
    for cell in tqdm(grid):
        rows += measured(ways, texts, cell, args.ways.split(","), args.rounds, is_cpu=args.cpu)
        if args.json:
            text = to_json("answer grid", model.name, [asdict(row) for row in rows], settings)
            args.json.write_text(f"{text}\n", encoding="utf-8")
    name = "llama.cpp" if is_llama else "generate"
    columns = (
        "chunks", "other tokens", "cached", "new tokens", "prompt", f"{name}, s", "way", "ran",
        "tokens a step", f"of {name}",
    )  # fmt: skip
    sys.stderr.write(f"{settings}\n")
    sys.stdout.write(table(columns, list(lines(rows)), left=1) + "\n\n")
    for way in args.ways.split(","):
        worst = max((row for row in rows if row.way == way), key=lambda row: row.ratio.median)
        sys.stdout.write(f"{way}: worst cell {worst.ratio.median:.2f}, {worst.cell}\n")


if __name__ == "__main__":
    main()
