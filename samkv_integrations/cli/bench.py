"""``samkv bench``: the measurements of docs/results.md."""

from __future__ import annotations

import typer

from samkv_integrations.cli.bench_fidelity import fidelity
from samkv_integrations.cli.bench_ingest import ingest
from samkv_integrations.cli.bench_latency import latency
from samkv_integrations.cli.bench_quality import quality
from samkv_integrations.cli.bench_serve import serve

app = typer.Typer(help="Measure answers and time.", no_args_is_help=True)
for command in (latency, ingest, serve, quality, fidelity):
    app.command()(command)
