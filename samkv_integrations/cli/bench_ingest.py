"""``samkv bench ingest``."""

from __future__ import annotations

import typer

from samkv_integrations import figures
from samkv_integrations.bench import ingest_speed
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import comma_lists as lists
from samkv_integrations.cli.bench_table import time_table
from samkv_integrations.cli.loading import use_threads_for

_COLUMNS = (
    "n_chunks", "chunk_tokens", "n_tokens", "tokens_per_s", "forward_tokens_per_s", "speed_ratio",
    "analysis_share", "write_share",
)  # fmt: skip


def ingest(
    shape: args.Shape = "qwen2.5-0.5b", layers: args.Layers = None, dtype: args.Dtype = "auto",
    device: args.ShapeDevice = "cpu", chunks: args.Chunks = "8",
    chunk_tokens: args.ChunkTokens = "512", repeats: args.Repeats = 3,
    folder: args.BenchFolder = None, as_json: args.Json = False,
) -> None:  # fmt: skip
    """Tokens per second of caching chunks, against a plain forward over the same texts."""
    config = ingest_speed.IngestConfig(
        shape=shape, layers=layers, dtype=dtype, device=device, repeats=repeats, folder=folder,
        n_chunks=tuple(lists.counts("--chunks", chunks)),
        chunk_tokens=tuple(lists.counts("--chunk-tokens", chunk_tokens)),
    )  # fmt: skip
    use_threads_for(shape)
    rows = list(ingest_speed.run(config))
    if as_json:
        typer.echo(figures.to_json("bench ingest", rows[0]["model"], rows))
        return
    typer.echo(time_table(_COLUMNS, rows))
    for row in rows:
        stages = ", ".join(f"{name} {share:.1%}" for name, share in row["stages"].items())
        typer.echo(f"\n{row['n_chunks']} chunks of {row['chunk_tokens']}: {stages}")
