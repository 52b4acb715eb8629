"""``samkv plan``: what chunks will take and what questions about them will cost, on paper."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product

import typer

from samkv_integrations import figures
from samkv_integrations.bench import markdown as markdown_tables
from samkv_integrations.bench import sizing
from samkv_integrations.bench.shapes import SHAPES, sizes_of
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import comma_lists as lists
from samkv_integrations.cli import tables
from samkv_integrations.errors import InvalidOption, UnknownOption
from samkv_integrations.figures import Row

_DEVICES = ("cpu", "cuda")


def plan(
    model: args.PlannedModels, chunks: args.PlannedChunks,
    chunk_tokens: args.PlannedChunkTokens = "512", store_bits: args.PlannedBits = "4",
    chunks_per_question: args.QuestionChunks = 8, question_tokens: args.QuestionTokens = 64,
    answer_tokens: args.PlannedAnswer = 1, dtype: args.Dtype = "auto",
    layers: args.Layers = None, device: args.PlannedDevice = "cpu",
    prefill_tokens_s: args.PrefillSpeed = None, decode_tokens_s: args.DecodeSpeed = None,
    disk_gb_s: args.DiskSpeed = None, check_gb_s: args.CheckSpeed = sizing.CHECK_GB_S,
    remote_gb_s: args.RemoteSpeed = None, remote_latency_ms: args.RemoteLatency = 0.0,
    disk_usd_gb_month: args.DiskPrice = None, remote_usd_gb_month: args.RemotePrice = None,
    columns: args.Columns = None, as_json: args.Json = False,
    markdown: args.PlanMarkdown = False,
) -> None:  # fmt: skip
    """What chunks take, and what questions about them cost, worked out from a model's config.

    Nothing is measured and no weights are needed. Every combination of the lists is a row.
    """
    chosen = None if columns is None else _known(lists.words(columns))
    if device not in _DEVICES:
        raise InvalidOption(f"--device {device!r}; allowed: {', '.join(_DEVICES)}")
    works = [
        sizing.Workload(
            n_chunks=n_chunks, chunk_tokens=length, store_bits=bits, answer_tokens=answer_tokens,
            chunks_per_question=chunks_per_question, question_tokens=question_tokens,
        )
        for n_chunks, length, bits in product(
            _counts("--chunks", chunks), _counts("--chunk-tokens", chunk_tokens),
            _counts("--store-bits", store_bits),
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
            _speeds("--prefill-tokens-s", prefill_tokens_s), _speeds("--disk-gb-s", disk_gb_s),
            _speeds("--remote-gb-s", remote_gb_s),
        )
    ]  # fmt: skip
    shapes = [sizes_of(name, layers=layers, dtype=dtype) for name in _models(model)]
    rows = [sizing.row_of(*each) for each in product(shapes, works, machines)]
    _show(rows, chosen, as_json=as_json, markdown=markdown)


def _show(
    rows: Sequence[Row], columns: Sequence[str] | None, *, as_json: bool, markdown: bool
) -> None:
    if as_json:
        tables.write_json("plan", rows[0]["model"] if len(rows) == 1 else None, rows)
        return
    if columns is None and len(rows) == 1:
        heads: list[str] = [rows[0]["model"], ""]
        named = [n for n in _CELLS if n != "model" and rows[0][n] is not None]
        cells: list[tuple[str, ...]] = [
            (_HEADS.get(n, n.replace("_", " ")), _CELLS[n](rows[0][n])) for n in named
        ]
    else:
        wanted = columns or _compared(rows)
        heads = [_HEADS.get(name, name.replace("_", " ")) for name in wanted]
        cells = [tuple(_cell(name, row[name]) for name in wanted) for row in rows]
    if markdown:
        typer.echo(markdown_tables.table(heads, cells))
    else:
        narrow = [head.replace(" ", "\n") for head in heads]
        tables.console().print(tables.table(narrow, cells, gap=1))


def _compared(rows: Sequence[Row]) -> list[str]:
    """The settings that differ between rows, and the figures that decide."""
    settings = [name for name in _CELLS if name not in sizing.Sizing.__dataclass_fields__]
    differing = [name for name in settings if len({row[name] for row in rows}) > 1]
    return [*differing, *(n for n in _DECISIVE if any(row[n] is not None for row in rows))]


def _cell(name: str, value: object) -> str:
    return "-" if value is None else _CELLS[name](value)


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


_CELLS: Mapping[str, Callable[..., str]] = {
    **dict.fromkeys(("model", "dtype", "device"), str),
    **dict.fromkeys(("n_chunks", "chunk_tokens", "store_bits", "chunks_per_question"), _plain),
    **dict.fromkeys(("question_tokens", "answer_tokens"), _plain),
    **dict.fromkeys(("prefill_tokens_s", "decode_tokens_s"), _number),
    **dict.fromkeys(("disk_gb_s", "check_gb_s", "remote_gb_s", "remote_latency_ms"), _number),
    **dict.fromkeys(("disk_usd_gb_month", "remote_usd_gb_month"), _number),
    "chunk_bytes": figures.size, "chunk_ratio": figures.percent, "read_bytes": figures.size,
    "total_bytes": figures.size,
    **dict.fromkeys(("read_s", "check_s", "fetch_s", "recompute_s"), _duration),
    **dict.fromkeys(("full_prefill_s", "first_token_s"), _duration),
    "break_even_gb_s": _number, "requests_per_s": _number, "bound": str,
    "remote_requests_per_s": _number, "remote_bound": str, "ingest_s": _duration,
    **dict.fromkeys(("disk_usd_month", "remote_usd_month"), _number),
}  # fmt: skip
"""Every column -> how a value of it is written."""

_DECISIVE = (
    "chunk_bytes", "total_bytes", "first_token_s", "full_prefill_s", "break_even_gb_s",
    "requests_per_s", "bound", "ingest_s",
)  # fmt: skip
"""Figures that fit beside each other; --columns gives others."""

_HEADS: Mapping[str, str] = {
    "n_chunks": "chunks",
    "store_bits": "bits",
    "prefill_tokens_s": "prefill, tokens/s",
    "decode_tokens_s": "decoding, tokens/s",
    "disk_gb_s": "disk, GB/s",
    "check_gb_s": "checking, GB/s",
    "remote_gb_s": "remote, GB/s",
    "remote_latency_ms": "remote latency, ms",
    "disk_usd_gb_month": "disk, USD a GB and month",
    "remote_usd_gb_month": "remote, USD a GB and month",
    "chunk_bytes": "a chunk",
    "chunk_ratio": "of bfloat16",
    "read_bytes": "read of a chunk",
    "total_bytes": "all chunks",
    "read_s": "read",
    "check_s": "check",
    "fetch_s": "fetch",
    "recompute_s": "recompute",
    "full_prefill_s": "full prefill",
    "first_token_s": "first token",
    "break_even_gb_s": "break-even, GB/s",
    "requests_per_s": "requests/s",
    "bound": "bound by",
    "remote_requests_per_s": "requests/s, all fetched",
    "remote_bound": "then bound by",
    "ingest_s": "ingest",
    "disk_usd_month": "disk, USD a month",
    "remote_usd_month": "remote, USD a month",
}


def _models(names: Iterable[str]) -> list[str]:
    return [each for name in names for each in (SHAPES if name == "all" else [name])]


def _known(columns: Sequence[str]) -> Sequence[str]:
    for name in columns:
        if name not in _CELLS:
            raise UnknownOption.among("column", name, _CELLS)
    if not columns:
        raise InvalidOption(f"--columns names none; give some of {', '.join(_CELLS)}")
    return columns


def _counts(option: str, text: str) -> list[int]:
    found = lists.counts(option, text)
    if not found:
        raise InvalidOption(f"{option} {text!r} names no number; give one or more, as in 4,8")
    return found


def _speeds(option: str, text: str | None) -> Sequence[float | None]:
    if text is None:
        return [None]
    found = lists.shares(option, text)
    if not found:
        raise InvalidOption(f"{option} {text!r} names no number; give one or more, as in 0.5,3")
    return found
