"""``samkv methods``."""

from __future__ import annotations

import typer

from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.eviction import EVICTIONS, Eviction
from samkv_integrations.methods import METHODS, Method


def methods(as_json: args.Json = False, markdown: args.AsMarkdown = False) -> None:
    """List the ways of answering from chunk caches, and of evicting KV entries while answering."""
    tabled: list[tuple[str, Method | Eviction]] = [
        *(("method", each) for each in METHODS.values()),
        *(("eviction", each) for each in EVICTIONS.values()),
    ]
    rows = [
        {"name": each.name, "kind": kind, "paper": each.paper, "summary": each.summary}
        for kind, each in tabled
    ]
    if as_json:
        tables.write_json("methods", None, rows)
        return
    cells = [tuple(row.values()) for row in rows]
    columns = ("name", "kind", "paper", "summary")
    if markdown:
        named = [(f"`{name}`", *others) for name, *others in cells]
        typer.echo(tables.markdown_table(columns, named, left=4))
    else:
        tables.console().print(tables.table(columns, cells, left=4))
