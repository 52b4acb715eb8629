"""``samkv store push`` and ``pull``: caches that machines share. No model is loaded."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from samkv_integrations.cache.upkeep import Moved
from samkv_integrations.cache.upkeep import pull as pull_caches
from samkv_integrations.cache.upkeep import push as push_caches
from samkv_integrations.chroma.database import Database
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli.sizes import bytes_of
from samkv_integrations.cli.stores import keys_of, progress_bar, store_in
from samkv_integrations.errors import InvalidOption
from samkv_integrations.figures import size

SOME_LEFT = 1
"""Exit code if caches could not be copied."""


def push(
    folder: args.Folder = Path(".samkv"), remote: args.Remote = None,
    namespace: args.Namespace = "", as_json: args.Json = False,
) -> None:  # fmt: skip
    """Put the caches that other machines lack where they find them. Exit code 1 if some are left.

    'samkv ingest --remote' does it as it goes; this is for what was made without it, or while it
    did not answer.
    """
    store = store_in(folder, namespace, _given(remote), is_new=False)
    with progress_bar("pushing") as show:
        done = push_caches(store, progress=show)
    _show("push", done, "put", as_json=as_json)
    if done.n_left:
        raise typer.Exit(SOME_LEFT)


def pull(
    folder: args.Folder = Path(".samkv"), remote: args.Remote = None,
    collections: args.Collections = None, chroma: args.ChromaServer = None,
    max_bytes: args.WarmBytes = None,
    namespace: args.Namespace = "", as_json: args.Json = False,
) -> None:  # fmt: skip
    """Fetch caches that other machines have made, the newest first, before questions need them."""
    limit = None if max_bytes is None else bytes_of("--bytes", max_bytes)
    keys = keys_of(Database(folder / "chroma", chroma), collections)
    store = store_in(folder, namespace, _given(remote))
    with progress_bar("pulling") as show:
        done = pull_caches(store, keys, max_bytes=limit, progress=show)
    _show("pull", done, "fetched", as_json=as_json)


def _given(remote: str | None) -> str:
    if remote is None:
        raise InvalidOption(
            "--remote is missing; give the URL that machines share, or SAMKV_REMOTE"
        )
    return remote


def _show(command: str, done: Moved, what: str, *, as_json: bool) -> None:
    if as_json:
        tables.write_json(f"store {command}", None, [asdict(done)])
        return
    left = f", {done.n_left} left" if done.n_left else ""
    tables.console().print(f"{done.n_chunks} caches {what}, {size(done.n_bytes)}{left}")
