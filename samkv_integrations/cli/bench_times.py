"""``samkv bench latency`` and ``samkv bench ingest``: the measurements of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from samkv_integrations import figures
from samkv_integrations.bench import grid, ingest_speed, latency_plot, markdown, shapes
from samkv_integrations.bench import latency as timing
from samkv_integrations.cli import comma_lists as lists
from samkv_integrations.errors import InvalidOption
from samkv_integrations.methods import get_method

Row = Mapping[str, Any]


Shape = Annotated[str, typer.Option(help=f"One of {', '.join(shapes.shape_names())}.")]


Layers = Annotated[int | None, typer.Option(help="So many of the shape's layers; else all.")]


Dtype = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]


Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]


Chunks = Annotated[str, typer.Option(help="Chunks in the prompt: 1,4,8,...")]


ChunkTokens = Annotated[str, typer.Option(help="Tokens in a chunk: 256,512,...")]


Repeats = Annotated[int, typer.Option(help="Rounds that count; one more warms up.")]


Folder = Annotated[
    Path | None,
    typer.Option("--dir", help="Where the temporary store goes: the disk that is measured."),
]


Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


_CELL_COLUMNS = ("n_chunks", "chunk_tokens", "text_tokens", "cached_share", "page_cache",
                 "question")  # fmt: skip


_COLUMNS = (
    "label", "ttft_s", "ttft_ratio", "floor_ratio", "arithmetic_floor_s", "disk_floor_s",
    "kept_ratio", "recompute_ratio", "bytes_read", "bytes_ratio", "kv_ratio", "disk_ratio",
    "peak_bytes", "peak_ratio", "decode_tokens_per_s", "decode_ratio",
)  # fmt: skip


_INGEST_COLUMNS = (
    "n_chunks", "chunk_tokens", "n_tokens", "tokens_per_s", "forward_tokens_per_s", "speed_ratio",
    "analysis_share", "write_share",
)  # fmt: skip


def latency(
    shape: Shape = "qwen2.5-0.5b", layers: Layers = None, dtype: Dtype = "auto",
    device: Device = "cpu", chunks: Chunks = "8", chunk_tokens: ChunkTokens = "512",
    uncached: Annotated[
        str, typer.Option(help="Tokens of text that is of no chunk, after them: 0,150,...")
    ] = "0",
    cached: Annotated[
        str, typer.Option(help="Shares of the chunks that are stored at first: 1.0,0.5,...")
    ] = "1.0",
    page_cache: Annotated[
        str, typer.Option(help="Chunk files in the page cache before each question: "
                               "warm, cold or both.")
    ] = "warm",
    new_tokens: Annotated[int, typer.Option(help="Tokens of an answer; from 2 on their rate.")] = 1,
    repeats: Repeats = 3,
    memory: Annotated[bool, typer.Option(help="Measure memory, in one more round.")] = True,
    methods: Annotated[str, typer.Option(help="NAME,NAME,... or 'all'.")] = "all",
    folder: Folder = None, as_json: Json = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw first token over chunk length, .png or .svg.")
    ] = None,
) -> None:  # fmt: skip
    """Time, bytes and memory of a first token, with every combination of the lists given."""
    config = grid.LatencyConfig(
        shape=shape, layers=layers, dtype=dtype, device=device, new_tokens=new_tokens,
        n_chunks=tuple(lists.counts("--chunks", chunks)),
        chunk_tokens=tuple(lists.counts("--chunk-tokens", chunk_tokens)),
        text_tokens=tuple(lists.counts("--uncached", uncached)),
        cached_shares=tuple(lists.shares("--cached", cached)),
        page_caches=grid.page_caches(page_cache),
        repeats=repeats, memory=memory, folder=folder,
    )  # fmt: skip
    chosen = {name: get_method(name) for name in lists.method_names(methods)}
    if not chosen:
        raise InvalidOption(f"--methods {methods!r} names none; give some, or 'all'")
    if plot:
        latency_plot.check(plot, chosen)
    _use_threads_for(shape)
    rows = list(timing.run(config, chosen))
    if plot:
        latency_plot.draw(rows, plot, rows[0]["model"])
    if as_json:
        typer.echo(figures.to_json("bench latency", rows[0]["model"], rows))
        return
    typer.echo(_table((*_varying(rows), *_known(_COLUMNS, rows)), rows))


def ingest(
    shape: Shape = "qwen2.5-0.5b", layers: Layers = None, dtype: Dtype = "auto",
    device: Device = "cpu", chunks: Chunks = "8", chunk_tokens: ChunkTokens = "512",
    repeats: Repeats = 3, folder: Folder = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Tokens per second of caching chunks, against a plain forward over the same texts."""
    config = ingest_speed.IngestConfig(
        shape=shape, layers=layers, dtype=dtype, device=device, repeats=repeats, folder=folder,
        n_chunks=tuple(lists.counts("--chunks", chunks)),
        chunk_tokens=tuple(lists.counts("--chunk-tokens", chunk_tokens)),
    )  # fmt: skip
    _use_threads_for(shape)
    rows = list(ingest_speed.run(config))
    if as_json:
        typer.echo(figures.to_json("bench ingest", rows[0]["model"], rows))
        return
    typer.echo(_table(_INGEST_COLUMNS, rows))
    for row in rows:
        stages = ", ".join(f"{name} {share:.1%}" for name, share in row["stages"].items())
        typer.echo(f"\n{row['n_chunks']} chunks of {row['chunk_tokens']}: {stages}")


def _use_threads_for(shape: str) -> None:
    """The built-in model is so small that a second thread costs more than it gives."""
    if shape == shapes.BUILTIN:
        torch.set_num_threads(1)


def _varying(rows: Sequence[Row]) -> list[str]:
    """The columns of the cell that differ between rows."""
    return [name for name in _CELL_COLUMNS if len({row[name] for row in rows}) > 1]


def _known(columns: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """The columns that were measured: one that is empty in every row says nothing."""
    return [name for name in columns if any(row[name] for row in rows)]


def _table(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """A markdown table, ready for docs/results.md."""
    cells = [[_cell(name, row[name]) for name in columns] for row in rows]
    return markdown.table([column.replace("_", " ") for column in columns], cells)


def _cell(name: str, value: object) -> str:
    if value is None:
        return "-"
    if name.endswith("_bytes") or name == "bytes_read":
        assert isinstance(value, int | float)
        return figures.size(value)
    if name.endswith("tokens_per_s"):
        return f"{value:.1f}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
