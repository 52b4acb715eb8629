"""``samkv doctor`` measures what suits a model; ``samkv plan`` works out what caches will cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import typer

from samkv_integrations import figures
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli.loading import counts, shares, use_threads_for, words
from samkv_integrations.errors import InvalidOption, UnknownOption
from samkv_integrations.figures import Row

_DEVICES = ("cpu", "cuda")

CHECK_FAILED = 1
"""Exit code if a model is not computed exactly."""


def doctor(
    model: args.ModelName = "builtin", device: args.Device = "auto", dtype: args.Dtype = "auto",
    folder: args.CostFolder = None, questions: args.DoctorQuestions = None,
    as_json: args.Json = False,
) -> None:  # fmt: skip
    """Check that a model is computed exactly, and measure what suits it. Exit code 1 if it is not.

    It says which --store-bits to take, when full prefill is faster, and how many answers of each
    method are right.
    """
    from samkv_integrations.cache.disk import ChunkStore
    from samkv_integrations.evaluation.checkup import checkup, given_questions
    from samkv_integrations.model.loading import load_model

    asked = None if questions is None else given_questions(questions)
    use_threads_for(model)  # times of another number of threads would not be found again
    loaded = load_model(model, device=device, dtype=dtype)
    checks = list(checkup(loaded, None if folder is None else ChunkStore(folder / "kv"), asked))
    failed = [check.name for check in checks if not check.ok]
    if as_json:
        tables.write_json("doctor", model, [check.to_row() for check in checks])
    else:
        out = tables.console()
        words = [(c.name, "failed" if not c.ok else "warning" if c.is_warning else "ok", c.detail)
                 for c in checks]  # fmt: skip
        out.print(tables.table(("check", "", "detail"), words, left=3))
        verdict = f"FAILED: {', '.join(failed)}" if failed else "computed as by transformers"
        out.print(f"\n{model} in {loaded.dtype_name} on {loaded.device}: {verdict}")
    if failed:
        raise typer.Exit(CHECK_FAILED)


def plan(
    model: args.PlannedModels, chunks: args.NChunks, chunk_tokens: args.ChunkTokens = "512",
    store_bits: args.PlannedBits = "4", chunks_per_question: args.ChunksPerQuestion = 8,
    question_tokens: args.QuestionTokens = 64, answer_tokens: args.AnswerTokens = 1,
    dtype: args.Dtype = "auto", layers: args.Layers = None, device: args.PlannedDevice = "cpu",
    prefill_tokens_s: args.PrefillSpeed = None, decode_tokens_s: args.DecodeSpeed = None,
    disk_gb_s: args.DiskSpeed = None, check_gb_s: args.CheckSpeed = 4.0,
    remote_gb_s: args.RemoteSpeed = None, remote_latency_ms: args.RemoteLatency = 0.0,
    disk_usd_gb_month: args.DiskPrice = None, remote_usd_gb_month: args.RemotePrice = None,
    columns: args.Columns = None, as_json: args.Json = False,
    markdown: args.PlanAsMarkdown = False,
) -> None:  # fmt: skip
    """What chunks take, and what questions about them cost, worked out from a model's config.

    Nothing is measured and no weights are needed. Every combination of the lists is a row.
    """
    from samkv_integrations.evaluation import sizing
    from samkv_integrations.evaluation.shapes import SHAPES, sizes_of

    chosen = None if columns is None else words(columns)
    for name in chosen or ():
        if name not in _COLUMNS:
            raise UnknownOption.among("column", name, _COLUMNS)
    if chosen == []:
        raise InvalidOption(f"--columns names none; give some of {', '.join(_COLUMNS)}")
    if device not in _DEVICES:
        raise InvalidOption(f"--device {device!r}; allowed: {', '.join(_DEVICES)}")
    works = [
        sizing.Workload(
            n_chunks=n_chunks, chunk_tokens=length, store_bits=bits, answer_tokens=answer_tokens,
            chunks_per_question=chunks_per_question, question_tokens=question_tokens,
        )
        for n_chunks, length, bits in product(
            _some(counts, "--chunks", chunks),
            _some(counts, "--chunk-tokens", chunk_tokens),
            _some(counts, "--store-bits", store_bits),
        )
    ]  # fmt: skip
    machines = [
        sizing.Machine(
            on_gpu=device == "cuda", prefill_tokens_s=prefill, decode_tokens_s=decode_tokens_s,
            disk_gb_s=disk, check_gb_s=check_gb_s, remote_gb_s=remote,
            remote_latency_ms=remote_latency_ms, disk_usd_gb_month=disk_usd_gb_month,
            remote_usd_gb_month=remote_usd_gb_month,
        )
        for prefill, disk, remote in product(
            _some(shares, "--prefill-tokens-s", prefill_tokens_s),
            _some(shares, "--disk-gb-s", disk_gb_s),
            _some(shares, "--remote-gb-s", remote_gb_s),
        )
    ]  # fmt: skip
    names = [each for name in model for each in (SHAPES if name == "all" else [name])]
    shapes = [sizes_of(name, layers=layers, dtype=dtype) for name in names]
    rows = [sizing.row_of(*each) for each in product(shapes, works, machines)]
    if as_json:
        tables.write_json("plan", rows[0]["model"] if len(rows) == 1 else None, rows)
        return
    if chosen is None and len(rows) == 1:
        heads: list[str] = [rows[0]["model"], ""]
        cells: list[tuple[str, ...]] = [
            (head, shown(rows[0][name])) for name, (head, shown) in _COLUMNS.items()
            if name != "model" and rows[0][name] is not None
        ]  # fmt: skip
    else:
        wanted = chosen or _compared(rows)
        heads = [_COLUMNS[name][0] for name in wanted]
        cells = [
            tuple("-" if row[n] is None else _COLUMNS[n][1](row[n]) for n in wanted) for row in rows
        ]
    if markdown:
        typer.echo(tables.markdown_table(heads, cells))
    else:
        narrow = [head.replace(" ", "\n") for head in heads]
        tables.console().print(tables.table(narrow, cells, gap=1))


def _compared(rows: Sequence[Row]) -> list[str]:
    """The settings that differ between rows, and the figures that decide."""
    from samkv_integrations.evaluation.sizing import Sizing

    settings = [name for name in _COLUMNS if name not in Sizing.__dataclass_fields__]
    differing = [name for name in settings if len({row[name] for row in rows}) > 1]
    return [*differing, *(n for n in _DECISIVE if any(row[n] is not None for row in rows))]


def _plain(value: float | str) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _number(value: float) -> str:
    """Three digits of it, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _duration(value: float) -> str:
    """Seconds in the unit that suits them."""
    for unit, n_seconds in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if value >= 2 * n_seconds:
            return f"{value / n_seconds:,.1f} {unit}"
    return figures.seconds(value)


_COLUMNS: Mapping[str, tuple[str, Callable[..., str]]] = {
    "model": ("model", str),
    "dtype": ("dtype", str),
    "device": ("device", str),
    "n_chunks": ("chunks", _plain),
    "chunk_tokens": ("chunk tokens", _plain),
    "store_bits": ("bits", _plain),
    "chunks_per_question": ("chunks per question", _plain),
    "question_tokens": ("question tokens", _plain),
    "answer_tokens": ("answer tokens", _plain),
    "prefill_tokens_s": ("prefill, tokens/s", _number),
    "decode_tokens_s": ("decoding, tokens/s", _number),
    "disk_gb_s": ("disk, GB/s", _number),
    "check_gb_s": ("checking, GB/s", _number),
    "remote_gb_s": ("remote, GB/s", _number),
    "remote_latency_ms": ("remote latency, ms", _number),
    "disk_usd_gb_month": ("disk, USD a GB and month", _number),
    "remote_usd_gb_month": ("remote, USD a GB and month", _number),
    "chunk_bytes": ("a chunk", figures.size),
    "chunk_ratio": ("of bfloat16", figures.percent),
    "read_bytes": ("read of a chunk", figures.size),
    "total_bytes": ("all chunks", figures.size),
    "read_s": ("read", _duration),
    "check_s": ("check", _duration),
    "fetch_s": ("fetch", _duration),
    "recompute_s": ("recompute", _duration),
    "full_prefill_s": ("full prefill", _duration),
    "first_token_s": ("first token", _duration),
    "break_even_gb_s": ("break-even, GB/s", _number),
    "requests_per_s": ("requests/s", _number),
    "bound": ("bound by", str),
    "remote_requests_per_s": ("requests/s, all fetched", _number),
    "remote_bound": ("then bound by", str),
    "ingest_s": ("ingest", _duration),
    "disk_usd_month": ("disk, USD a month", _number),
    "remote_usd_month": ("remote, USD a month", _number),
}
"""Column of a row -> its head in a table, and how a value is written."""

_DECISIVE = (
    "chunk_bytes", "total_bytes", "first_token_s", "full_prefill_s", "break_even_gb_s",
    "requests_per_s", "bound", "ingest_s",
)  # fmt: skip
"""Figures that fit beside each other; --columns gives others."""


def _some(
    read: Callable[[str, str], Sequence[float]], option: str, text: str | None
) -> Sequence[Any]:
    """The numbers of an option; None alone if it is not given."""
    if text is None:
        return [None]
    found = read(option, text)
    if not found:
        raise InvalidOption(f"{option} {text!r} names no number; give one or more, as in 4,8")
    return found
