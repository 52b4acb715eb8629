"""``samkv bench latency``."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from samkv_integrations import figures
from samkv_integrations.bench import grid, latency_plot
from samkv_integrations.bench import latency as bench
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import comma_lists as lists
from samkv_integrations.cli.bench_table import time_table
from samkv_integrations.cli.loading import use_threads_for
from samkv_integrations.errors import InvalidOption
from samkv_integrations.figures import Row
from samkv_integrations.methods import get_method

_CELL_COLUMNS = ("n_chunks", "chunk_tokens", "text_tokens", "cached_share", "page_cache",
                 "question")  # fmt: skip

_COLUMNS = (
    "label", "ttft_s", "ttft_ratio", "floor_ratio", "arithmetic_floor_s", "disk_floor_s",
    "kept_ratio", "recompute_ratio", "bytes_read", "bytes_ratio", "kv_ratio", "disk_ratio",
    "peak_bytes", "peak_ratio", "decode_tokens_per_s", "decode_ratio",
)  # fmt: skip


def latency(
    shape: args.Shape = "qwen2.5-0.5b", layers: args.Layers = None, dtype: args.Dtype = "auto",
    device: args.ShapeDevice = "cpu", chunks: args.Chunks = "8",
    chunk_tokens: args.ChunkTokens = "512", uncached: args.Uncached = "0",
    cached: args.Cached = "1.0", page_cache: args.PageCache = "warm",
    new_tokens: args.NewTokens = 1, repeats: args.Repeats = 3, memory: args.Memory = True,
    methods: args.AllMethods = "all", folder: args.BenchFolder = None, as_json: args.Json = False,
    plot: args.LatencyPlot = None,
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
    use_threads_for(shape)
    rows = list(bench.run(config, chosen))
    if plot:
        latency_plot.draw(rows, plot, rows[0]["model"])
    if as_json:
        typer.echo(figures.to_json("bench latency", rows[0]["model"], rows))
        return
    typer.echo(time_table((*_varying(rows), *_known(_COLUMNS, rows)), rows))


def _varying(rows: Sequence[Row]) -> list[str]:
    """The columns of the cell that differ between rows."""
    return [name for name in _CELL_COLUMNS if len({row[name] for row in rows}) > 1]


def _known(columns: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """The columns that were measured: one that is empty in every row says nothing."""
    return [name for name in columns if any(row[name] for row in rows)]
