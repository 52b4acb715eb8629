"""Whole answers against plain transformers' ``generate``, over prompts of many forms.

    python -m benchmarks.answer_grid --quick
    python -m benchmarks.answer_grid --model FILE.gguf --dtype auto --peer llama.cpp --cpu

Every row is a cell: so many chunks of so many tokens, so many other tokens, a share of the chunks
cached, so many new tokens. The ways take turns, with greedy answers of exactly that length; figures
are medians of ratios to ``generate`` in the same round, template and tokenising included on both
sides. Where others work too, run it with OMP_NUM_THREADS=1 and --cpu.

With ``--peer`` prompts are four chunks that are cached, of 512 to 4,096 tokens in all, and a
process of llama-cpp-python (``--peer-python``: of which environment) answers them too, from the
same file with as many threads.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, product
from pathlib import Path
from statistics import median
from subprocess import PIPE, Popen
from typing import Any

import torch
from tqdm.auto import tqdm

from benchmarks.commands import markdown_table as table
from benchmarks.run_settings import hardware
from samkv_integrations import ChunkStore, Engine
from samkv_integrations.cli.formatting import to_json
from samkv_integrations.prompt import rag_prompt
from samkv_integrations.report import Report
from samkv_integrations.runtimes.transformers.loading import load_model
from samkv_integrations.runtimes.transformers.runtime import Model

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


def peer_cells() -> list[Cell]:
    """Prompts of 512 to 4,096 tokens, answers of 32 to 256."""
    return [
        Cell(chunks=4, chunk_tokens=n_tokens // 4, others=0, cached=1.0, new_tokens=new)
        for n_tokens, new in product((512, 1024, 2048, 4096), (32, 128, 256))
    ]


class Texts:
    """Texts of so many tokens from real paragraphs, each of which begins where the last ended."""

    def __init__(self, model: Model) -> None:
        files = sorted(PARAGRAPHS.glob("*.txt"))
        text = "\n\n".join(file.read_text(encoding="utf-8").strip() for file in files)
        self._model, self._ids = model, model.tokenize(text, special=False)
        self.at = 0

    def next(self, n_tokens: int) -> str:
        found = [self._ids[(self.at + offset) % len(self._ids)] for offset in range(n_tokens)]
        self.at += n_tokens
        return self._model.detokenize(found).strip()


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Seconds of a whole answer, and what ran."""

    seconds: float
    report: Report | None = None


class Peer:
    """A process that answers by llama.cpp, see `benchmarks.llama_peer`. python: its interpreter."""

    def __init__(self, python: str, file: str) -> None:
        script, n_threads = Path(__file__).with_name("llama_peer.py"), str(torch.get_num_threads())
        self._process = Popen([python, script, file, n_threads], stdin=PIPE, stdout=PIPE, text=True)

    def answer(self, ids: Sequence[int], new_tokens: int) -> dict[str, float]:
        """The seconds of an answer."""
        lines, told = self._process.stdin, self._process.stdout
        assert lines is not None and told is not None
        lines.write(json.dumps({"ids": list(ids), "new_tokens": new_tokens}) + "\n")
        lines.flush()
        found: dict[str, float] = json.loads(told.readline())
        return found


class Ways:
    """Each way to answer a prompt.

    calibrated: whether costs are measured, as by ``samkv doctor``. clock: of time.
    """

    def __init__(self, model: Model, *, calibrated: bool, clock: Callable[[], float]) -> None:
        self.model, self.clock = model, clock
        folder = tempfile.mkdtemp(prefix="samkv-grid-")
        self.engine = Engine(model, ChunkStore(Path(folder) / "kv"))
        if calibrated:
            self.engine.calibrate()
        model.end_ids = lambda more: frozenset()  # type: ignore[method-assign]

    def plain(self, messages: Any, new_tokens: int) -> Timed:
        """transformers' own."""
        model, began = self.model, self.clock()
        with torch.inference_mode():
            ids = model.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            made = model.hf.generate(
                **ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False
            )
            model.tokenizer.decode(made[0, ids["input_ids"].shape[1] :])
        return Timed(seconds=self.clock() - began)

    def peer(self, peer: Peer, messages: Any, new_tokens: int) -> Timed:
        """llama.cpp's."""
        told = peer.answer(self.model.tokenize_prompt(self.engine.render(messages)), new_tokens)
        return Timed(seconds=told["cpu_s" if self.clock is time.process_time else "seconds"])

    def ours(self, messages: Any, new_tokens: int, chunks: Sequence[str], way: str) -> Timed:
        """An engine's, with the caches that there are and nothing of an earlier prompt."""
        self.engine.sequences.clear()
        before = set(self.engine.store.known_keys())
        began = self.clock()
        answer = self.engine.generate(messages, chunks, method=way, max_new_tokens=new_tokens)
        spent = self.clock() - began
        if made := set(self.engine.store.known_keys()) - before:
            self.engine.store.delete(*made)
        return Timed(seconds=spent, report=answer.report)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A cell and a way. ratio: to plain ``generate``; peer_ratio: to the peer; 0 without one.

    ran: what it turned out to be.
    """

    cell: Cell
    way: str
    prompt_tokens: int
    plain_s: float
    ratio: float
    peer_s: float
    peer_ratio: float
    tokens_per_step: float
    ran: str


def measured(
    ways: Ways, texts: Texts, cell: Cell, names: Sequence[str], rounds: int,
    peer: Peer | None = None,
) -> list[Row]:  # fmt: skip
    """A row for each way."""
    engine = ways.engine
    if stored := engine.store.known_keys():
        engine.store.delete(*stored)
    chunks = [texts.next(cell.chunk_tokens) for _ in range(cell.chunks)]
    engine.cache_chunks(chunks[: round(cell.cached * cell.chunks)])
    spent: dict[str, list[Timed]] = {name: [] for name in ("plain", "peer", *names)}
    for _ in range(rounds):
        others = texts.next(cell.others) + "\n\n" if cell.others else ""
        messages = rag_prompt(f"{others}What is said about the year?", chunks, chat=True)
        order = {"plain": partial(ways.plain, messages, cell.new_tokens)}
        if peer is not None:
            order["peer"] = partial(ways.peer, peer, messages, cell.new_tokens)
        for name in names:
            order[name] = partial(ways.ours, messages, cell.new_tokens, chunks, name)
        for name, run in order.items():
            spent[name].append(run())

    def ratio(name: str, other: str) -> float:
        pairs = zip(spent[name], spent[other], strict=True)
        return median(mine.seconds / theirs.seconds for mine, theirs in pairs)

    return [
        Row(
            cell=cell, way=name, prompt_tokens=report.prompt_tokens,
            plain_s=median(timed.seconds for timed in spent["plain"]),
            ratio=ratio(name, "plain"),
            peer_s=median(timed.seconds for timed in spent["peer"]) if peer else 0.0,
            peer_ratio=ratio(name, "peer") if peer else 0.0,
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
            str(cell.new_tokens), str(row.prompt_tokens), f"{row.plain_s:.2f}", row.way,
            row.ran, f"{row.tokens_per_step:.1f}", f"{row.ratio:.2f}",
            *([f"{row.peer_s:.2f}", f"{row.peer_ratio:.2f}"] if row.peer_s else []),
        ]  # fmt: skip


def main() -> None:
    """The table, on standard output, and the worst cell of each way."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.answer_grid")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quick", action="store_true", help="a part that covers all lengths")
    parser.add_argument("--ways", default="auto", help="methods, with ',' between")
    parser.add_argument("--calibrated", action="store_true", help="as after samkv doctor")
    parser.add_argument("--cpu", action="store_true", help="CPU seconds in place of wall time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most-tokens", type=int, default=8000, help="of a prompt")
    parser.add_argument("--least-tokens", type=int, default=0, help="of a prompt")
    parser.add_argument("--skip", type=int, default=0, help="cells to leave out at the beginning")
    parser.add_argument("--peer", choices=["llama.cpp"], help="a process of llama-cpp-python")
    parser.add_argument("--peer-python", default=sys.executable, help="that has llama-cpp-python")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = load_model(args.model, dtype=args.dtype)
    most_tokens = min(args.most_tokens, model.context_window)
    grid = [
        cell
        for cell in (peer_cells() if args.peer else cells(quick=args.quick))[args.skip :]
        if args.least_tokens <= cell.n_tokens <= most_tokens
    ]
    if not grid:
        parser.error(
            f"no cell after --skip {args.skip} has {args.least_tokens} to {most_tokens} tokens; "
            "give other --least-tokens or --most-tokens, or leave out --quick"
        )
    peer = Peer(args.peer_python, args.model) if args.peer else None
    clock = time.process_time if args.cpu else time.perf_counter
    ways, texts = Ways(model, calibrated=args.calibrated, clock=clock), Texts(model)
    warm = Cell(chunks=2, chunk_tokens=40, others=0, cached=1.0, new_tokens=2)
    measured(ways, texts, warm, args.ways.split(","), 1)
    rows: list[Row] = []
    settings = {
        "hardware": hardware(model), "calibrated": args.calibrated, "cpu_seconds": args.cpu,
    }  # fmt: skip
    for cell in tqdm(grid):
        rows += measured(ways, texts, cell, args.ways.split(","), args.rounds, peer)
        if args.json:
            text = to_json("answer grid", model.name, [asdict(row) for row in rows], settings)
            args.json.write_text(f"{text}\n", encoding="utf-8")
    columns = (
        "chunks", "other tokens", "cached", "new tokens", "prompt", "generate, s", "way", "ran",
        "tokens a step", "of generate", *(("llama.cpp, s", "of llama.cpp") if peer else ()),
    )  # fmt: skip
    sys.stdout.write(table(columns, list(lines(rows)), left=1) + "\n\n")
    for way in args.ways.split(","):
        worst = max((row for row in rows if row.way == way), key=lambda row: row.ratio)
        sys.stdout.write(f"{way}: worst cell {worst.ratio:.2f}, {worst.cell}\n")


if __name__ == "__main__":
    main()
