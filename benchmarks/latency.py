"""Time to first token, bytes and memory of every method, and the floors under its time.

With ``--runtime llama_cpp``: first tokens beside llama.cpp's own, see `benchmarks.first_tokens`.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Literal

import torch
import typer

from benchmarks import disk, first_tokens, models
from benchmarks import options as own
from benchmarks.commands import (
    TRUTH,
    command_line,
    counts,
    loaded_model,
    method_names,
    shares,
    show_run,
    time_table,
)
from benchmarks.memory import Peak, peak_of
from benchmarks.models import Words, device_name
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import formatting
from samkv_integrations.cli.formatting import Row
from samkv_integrations.engine import Engine
from samkv_integrations.errors import InvalidOption, PromptTooLong
from samkv_integrations.methods import Method, get_method
from samkv_integrations.prompt.rag_template import rag_prompt
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.store.disk import ChunkStore

_QUESTIONS = ("What is the name of the river?", "What is the name of the road?")
_BF16_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the rounds of one method and question gave.

    reports: of the rounds that count, in order. stored_shares: of the chunks in the prompt, those
    that were in the store when the question came, in the same rounds. peaks: of the round that
    measured memory, if one did.
    """

    reports: list[Row] = field(default_factory=list)
    stored_shares: list[float] = field(default_factory=list)
    peaks: list[Peak] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Texts:
    """What is asked about, for all cells with chunks of one length. uncached: by its tokens."""

    chunks: Sequence[str]
    uncached: Mapping[int, str]

    @classmethod
    def of(cls, config: LatencyConfig, words: Words, chunk_tokens: int) -> Texts:
        """Random texts."""
        chunks = [words.text(chunk_tokens) for _ in range(max(config.n_chunks))]
        uncached = {n: words.text(n) if n else "" for n in config.text_tokens}
        return cls(chunks=chunks, uncached=uncached)

    def prompt(self, cell: Cell, question: str) -> str:
        """The prompt of a cell; text of no chunk stands after the chunks, before the question."""
        uncached = self.uncached[cell.text_tokens]
        documents = [*self.chunks[: cell.n_chunks], *([uncached] if uncached else [])]
        prompt = rag_prompt(question, documents)
        assert isinstance(prompt, str)
        return prompt


def run(config: LatencyConfig, methods: Mapping[str, Method]) -> Iterator[Row]:
    """A row for each cell, question and method, cell after cell as they are measured.

    In every round the methods take turns in one process, so that a ratio is to `recompute` of the
    same round. One more round before them warms up, one after them measures memory.

    Raises:
        PromptTooLong: a prompt of the grid exceeds the context window; nothing is measured then.
    """
    model = config.model()
    words = Words(model, config.seed)
    texts = {length: Texts.of(config, words, length) for length in config.chunk_tokens}
    for length, of_length in texts.items():
        for cell in config.cells(length):
            _check_length(model, cell, of_length.prompt(cell, _QUESTIONS[0]), config.new_tokens)
    for length, of_length in texts.items():
        with tempfile.TemporaryDirectory(dir=config.folder) as folder:
            store = ChunkStore(Path(folder) / "kv")
            engine = Engine(model, store)
            engine.cache_chunks(of_length.chunks)
            per_token = _bf16_bytes_per_token(model)
            disk_ratio = store.stats().bytes / (sum(map(words.count, of_length.chunks)) * per_token)
            for cell in config.cells(length):
                bench = CellBench(engine, store, cell, of_length, config)
                measured = bench.measure(methods)
                for row in rows_of(measured, per_token, bench.disk_bytes_per_s):
                    yield {**row, **_settings(config, model, cell), "disk_ratio": disk_ratio}


class CellBench:
    """Asks the questions of one cell, each time from the same store."""

    def __init__(
        self, engine: Engine, store: ChunkStore, cell: Cell, texts: Texts, config: LatencyConfig
    ) -> None:
        self._engine = engine
        self._store = store
        self._cell = cell
        self._config = config
        self._chunks = list(texts.chunks[: cell.n_chunks])
        self._prompts = [texts.prompt(cell, text) for text in _QUESTIONS[: cell.questions]]
        engine.cache_chunks(self._chunks)
        self.disk_bytes_per_s = disk.read_bytes_per_s(
            disk.chunk_files(store), cold=cell.page_cache == "cold", repeats=config.repeats
        )
        picked = random.Random(config.seed).sample(self._chunks, cell.n_cached)
        store.delete(*(engine.key_of(text) for text in set(self._chunks) - set(picked)))
        self._keys = set(store.keys())

    def measure(self, methods: Mapping[str, Method]) -> dict[tuple[str, int], Measured]:
        """The measurements of every method and question, under (label, number of the question)."""
        numbers = range(1, self._cell.questions + 1)
        measured = {(label, n): Measured() for label in methods for n in numbers}
        last = self._config.repeats + 1
        for round_ in range(last + self._config.memory):
            for label, method in methods.items():
                self._restore()
                for number in numbers:
                    self._ask(method, number, measured[label, number], round_, last)
        return measured

    def _ask(self, method: Method, number: int, into: Measured, round_: int, last: int) -> None:
        """Ask one question; the first round is not kept, one after the ``last`` is for memory."""
        engine = self._engine
        held = sum(
            engine.store.contains(engine.key_of(text), engine.fingerprint) for text in self._chunks
        )
        engine.sequences.clear()  # a question goes on from no other
        if self._cell.page_cache == "cold":
            disk.drop(disk.chunk_files(self._store))

        def answer() -> Row:
            return engine.generate(
                self._prompts[number - 1], self._chunks, method=method,
                max_new_tokens=self._config.new_tokens,
            ).report.to_dict()  # fmt: skip

        if round_ == last:
            into.peaks.append(peak_of(answer, engine.model.device))
            return
        report = answer()
        if round_:
            into.reports.append(report)
            into.stored_shares.append(held / len(self._chunks))

    def _restore(self) -> None:
        """Delete what a question has left in the store."""
        self._store.delete(*(set(self._store.keys()) - self._keys))


def rows_of(
    measured: Mapping[tuple[str, int], Measured],
    bf16_bytes_per_token: int,
    disk_bytes_per_s: float | None,
) -> Iterator[Row]:
    """A row for each label and question of a cell: medians, ratios and floors.

    ``bytes_ratio`` is bytes read over the whole prompt's KV in bfloat16, ``kv_ratio`` the working
    cache over that of full prefill, whatever the dtype. Any other ratio is the median over rounds
    of those to `recompute` in the same round and for the same question, None without it.
    """
    for (label, number), mine in measured.items():
        truth = measured.get((TRUTH, number))
        row = dict(mine.reports[-1])
        for name in row:
            if name.endswith("_s"):
                row[name] = statistics.median(report[name] for report in mine.reports)
        yield {
            "label": label,
            "question": number,
            "stored_share": statistics.fmean(mine.stored_shares),
            **row,
            "bytes_ratio": row["bytes_read"] / (row["prompt_tokens"] * bf16_bytes_per_token),
            "kv_ratio": row["kv_bytes"] / row["full_kv_bytes"],
            "ttft_ratio": _median_ratio(mine, truth, "ttft_s"),
            "decode_ratio": _median_ratio(mine, truth, "decode_tokens_per_s"),
            **_memory(mine, truth),
            **floors(row, _median_of(truth, "ttft_s"), disk_bytes_per_s),
        }


def floors(row: Row, truth_s: float | None, disk_bytes_per_s: float | None) -> Row:
    """The least that a method's own figures cost on this machine, and its time over their sum.

    computed_tokens: tokens x layers that it computes, over the layers. arithmetic_floor_s: those
    at the seconds that full prefill takes a token of the same prompt (``truth_s`` for all of it).
    disk_floor_s: the bytes that it reads at the speed of reading whole files. None where unknown.
    """
    computed = row["recompute_ratio"] * row["context_tokens"] + row["uncached_tokens"]
    arithmetic = None if truth_s is None else computed * truth_s / row["prompt_tokens"]
    if row["bytes_read"] == 0:
        reading: float | None = 0.0
    else:
        reading = row["bytes_read"] / disk_bytes_per_s if disk_bytes_per_s else None
    floor = None if arithmetic is None or reading is None else arithmetic + reading
    return {
        "computed_tokens": computed,
        "disk_bytes_per_s": disk_bytes_per_s,
        "arithmetic_floor_s": arithmetic,
        "disk_floor_s": reading,
        "floor_ratio": row["ttft_s"] / floor if floor else None,
    }


def _memory(mine: Measured, truth: Measured | None) -> Row:
    """Peaks of the round that measured them, None without one."""
    peak = mine.peaks[-1] if mine.peaks else None
    full = truth.peaks[-1].tensor_bytes if truth and truth.peaks else None
    return {
        "peak_bytes": peak.tensor_bytes if peak else None,
        "peak_ratio": peak.tensor_bytes / full if peak and full else None,
        "peak_python_bytes": peak.python_bytes if peak else None,
    }


def _median_of(measured: Measured | None, name: str) -> float | None:
    return statistics.median(r[name] for r in measured.reports) if measured else None


def _median_ratio(mine: Measured, truth: Measured | None, name: str) -> float | None:
    pairs = [(a[name], b[name]) for a, b in zip(mine.reports, truth.reports if truth else [],
                                                strict=False)]  # fmt: skip
    ratios = [own / full for own, full in pairs if full]
    return statistics.median(ratios) if ratios else None


def _settings(config: LatencyConfig, model: Model, cell: Cell) -> Row:
    """The columns that say what was measured."""
    return {
        "shape": config.shape,
        "layers": model.n_layers,
        "dtype": model.dtype_name,
        "device": device_name(model),
        "threads": torch.get_num_threads(),
        "repeats": config.repeats,
        "n_chunks": cell.n_chunks,
        "chunk_tokens": cell.chunk_tokens,
        "text_tokens": cell.text_tokens,
        "cached_share": cell.cached_share,
        "page_cache": cell.page_cache,
        "new_tokens": config.new_tokens,
    }


def _bf16_bytes_per_token(model: Model) -> int:
    """Keys and values of one token in bfloat16."""
    return 2 * model.n_layers * model.n_kv_heads * model.head_dim * _BF16_BYTES


def _check_length(model: Model, cell: Cell, prompt: str, new_tokens: int) -> None:
    # Each chunk is tokenised alone in a prompt, which may add a token at either end.
    n_tokens = len(model.tokenize(prompt, special=False)) + 2 * cell.n_chunks + new_tokens
    if n_tokens > model.context_window:
        raise PromptTooLong(
            f"chunks={cell.n_chunks} of chunk_tokens={cell.chunk_tokens} make a prompt of about "
            f"{n_tokens} tokens, and the context window of {model.name!r} is "
            f"{model.context_window}; give fewer or shorter chunks, or another shape"
        )


PageCache = Literal["warm", "cold"]

PAGE_CACHES: dict[str, tuple[PageCache, ...]] = {
    "warm": ("warm",), "cold": ("cold",), "both": ("warm", "cold"),
}  # fmt: skip
"""Word of the command line -> the states that it names."""

_OVERHEAD = 256
"""Tokens of a prompt around its texts, generously; and a few more between its chunks."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination of the lists.

    text_tokens: text after the chunks that is of none. cached_share: of the chunks, how many
        are in the store when the first question comes.
    """

    n_chunks: int
    chunk_tokens: int
    text_tokens: int
    cached_share: float
    page_cache: PageCache

    @property
    def n_cached(self) -> int:
        """Chunks in the store when the first question comes."""
        return round(self.cached_share * self.n_chunks)

    @property
    def questions(self) -> int:
        """How many are asked: a second one where the first may have left something behind."""
        return 1 if self.n_cached == self.n_chunks else 2


@dataclass(frozen=True, kw_only=True)
class LatencyConfig:
    """What to time. Texts, and weights but the built-in ones, are random with ``seed``.

    layers: so many of the shape's; None for all. new_tokens: of an answer, the first included.
    repeats: rounds that count. memory: whether one more round measures it. folder: where the
    temporary store goes, which decides what disk is measured; None for the system's.

    Raises:
        UnknownOption: there is no such shape.
        InvalidOption: any other value that cannot be measured.
    """

    shape: str = "qwen2.5-0.5b"
    layers: int | None = None
    dtype: str = "auto"
    device: str = "cpu"
    n_chunks: tuple[int, ...] = (8,)
    chunk_tokens: tuple[int, ...] = (512,)
    text_tokens: tuple[int, ...] = (0,)
    cached_shares: tuple[float, ...] = (1.0,)
    page_caches: tuple[PageCache, ...] = ("warm",)
    new_tokens: int = 1
    repeats: int = 3
    memory: bool = True
    folder: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        models.check(self.shape, self.layers, self.dtype)
        check_counts("chunks", self.n_chunks, 1)
        check_counts("chunk_tokens", self.chunk_tokens, 1)
        check_counts("uncached", self.text_tokens, 0)
        check_counts("new_tokens", [self.new_tokens], 1)
        check_counts("repeats", [self.repeats], 1)
        if not self.cached_shares:
            raise InvalidOption("cached is empty; give one share or more, as in 1.0,0.5")
        for share in self.cached_shares:
            if not 0 <= share <= 1:
                raise InvalidOption(f"cached={share:g}; a share must be between 0 and 1")
        if "cold" in self.page_caches:
            disk.require_cold()
        check_folder(self.folder)

    def cells(self, chunk_tokens: int) -> list[Cell]:
        """The cells of one chunk length, in an order in which few chunks are cached twice."""
        shares = sorted(set(self.cached_shares), reverse=True)
        grid = product(shares, self.n_chunks, self.text_tokens, self.page_caches)
        return [
            Cell(
                n_chunks=n, chunk_tokens=chunk_tokens, text_tokens=uncached,
                cached_share=share, page_cache=page_cache,
            )
            for share, n, uncached, page_cache in grid
        ]  # fmt: skip

    @property
    def window(self) -> int:
        """Tokens that the longest prompt and its answer may take, with some to spare."""
        chunks = max(self.n_chunks) * (max(self.chunk_tokens) + 8)
        return chunks + max(self.text_tokens) + self.new_tokens + _OVERHEAD

    def model(self) -> Model:
        """The model of this shape."""
        return models.build(
            self.shape, layers=self.layers, dtype=self.dtype, device=self.device, seed=self.seed,
            window=self.window,
        )  # fmt: skip


def page_caches(word: str) -> tuple[PageCache, ...]:
    """What ``warm``, ``cold`` or ``both`` stands for; InvalidOption for any other word."""
    if word not in PAGE_CACHES:
        raise InvalidOption(f"page_cache={word!r}; allowed: {', '.join(PAGE_CACHES)}")
    return PAGE_CACHES[word]


def check_folder(folder: Path | None) -> None:
    """Raise InvalidOption if no store can be made in ``folder``."""
    if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise InvalidOption(f"folder {folder} is not there, or not writable; make it first")


def check_counts(name: str, values: Sequence[int], least: int) -> None:
    """Raise InvalidOption unless there are ``values`` and none is below ``least``."""
    if not values:
        raise InvalidOption(f"{name} is empty; give one whole number or more, as in 4,8")
    for value in values:
        if value < least:
            raise InvalidOption(f"{name}={value}; it must be at least {least}")


_CELL_COLUMNS = ("n_chunks", "chunk_tokens", "text_tokens", "cached_share", "page_cache",
                 "question")  # fmt: skip

_COLUMNS = (
    "label", "ttft_s", "ttft_ratio", "floor_ratio", "arithmetic_floor_s", "disk_floor_s",
    "kept_ratio", "recompute_ratio", "bytes_read", "bytes_ratio", "kv_ratio", "disk_ratio",
    "peak_bytes", "peak_ratio", "decode_tokens_per_s", "decode_ratio",
)  # fmt: skip


def latency(
    model: own.TimedModel = None, runtime: own.OfRuntime = "transformers",
    questions: own.TimedQuestions = None, data: own.TimedData = None,
    shape: own.Shape = "qwen2.5-0.5b", layers: own.Layers = None, dtype: args.Dtype = "auto",
    device: own.ShapeDevice = "cpu", chunks: own.Chunks = "8",
    chunk_tokens: own.ChunkTokens = "512", uncached: own.Uncached = "0",
    cached: own.Cached = "1.0", page_cache: own.PageCache = "warm",
    new_tokens: own.NewTokens = 1, repeats: own.Repeats = 3, memory: own.Memory = True,
    methods: own.AllMethods = "all", folder: own.BenchFolder = None, as_json: args.Json = False,
) -> None:  # fmt: skip
    """Time, bytes and memory of a first token, with every combination of the lists given."""
    if runtime == "llama_cpp":
        asked = first_tokens.asked_of(questions or (), data, repeats)
        loaded = loaded_model(model or "smollm2", device, dtype, runtime)
        names = ["reuse", "auto"] if methods == "all" else method_names(methods)
        found = list(first_tokens.rows_of(loaded, asked, names))
        show_run(loaded, first_tokens.COLUMNS, found, as_json=as_json)
        return
    config = LatencyConfig(
        shape=shape, layers=layers, dtype=dtype, device=device, new_tokens=new_tokens,
        n_chunks=tuple(counts("--chunks", chunks)),
        chunk_tokens=tuple(counts("--chunk-tokens", chunk_tokens)),
        text_tokens=tuple(counts("--uncached", uncached)),
        cached_shares=tuple(shares("--cached", cached)),
        page_caches=page_caches(page_cache),
        repeats=repeats, memory=memory, folder=folder,
    )  # fmt: skip
    chosen = {name: get_method(name) for name in method_names(methods)}
    if not chosen:
        raise InvalidOption(f"--methods {methods!r} names none; give some, or 'all'")
    models.use_threads_for(shape)
    rows = list(run(config, chosen))
    if as_json:
        typer.echo(formatting.to_json("benchmarks latency", rows[0]["model"], rows))
        return
    typer.echo(time_table((*_varying(rows), *_known(_COLUMNS, rows)), rows))


def _varying(rows: Sequence[Row]) -> list[str]:
    """The columns of the cell that differ between rows."""
    return [name for name in _CELL_COLUMNS if len({row[name] for row in rows}) > 1]


def _known(columns: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """The columns that were measured: one that is empty in every row says nothing."""
    return [name for name in columns if any(row[name] for row in rows)]


app = command_line(latency)
main = app
