"""``samkv bench``: the measurements of docs/results.md."""

from __future__ import annotations

import typer

from samkv_integrations.cli.bench_fidelity import fidelity
from samkv_integrations.cli.bench_ingest import ingest
from samkv_integrations.cli.bench_latency import latency
from samkv_integrations.cli.bench_quality import quality

app = typer.Typer(help="Measure answers and time.", no_args_is_help=True)
for command in (latency, ingest, quality, fidelity):
    app.command()(command)
