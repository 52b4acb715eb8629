"""``samkv store``: what the folder of chunk caches holds, and whether it fits the records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import typer

from samkv_integrations import figures
from samkv_integrations.cache.chunk import normalise
from samkv_integrations.chroma.database import Database
from samkv_integrations.chroma.link import ChromaLink
from samkv_integrations.chroma.results import SyncResult
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli.loading import engine_of
from samkv_integrations.cli.store_care import budget, gc, verify, warm
from samkv_integrations.cli.store_shared import pull, push
from samkv_integrations.cli.stores import require_own_records, store_in
from samkv_integrations.documents import read_text
from samkv_integrations.errors import EmptyInput

app = typer.Typer(help="Look into the folder of chunk caches.", no_args_is_help=True)


@app.command()
def stats(folder: args.Folder = Path(".samkv"), as_json: args.Json = False) -> None:
    """Show what the chunk caches of a folder take and how often they were used.

    By model and namespace.
    """
    store = store_in(folder)
    found = store.stats(everyone=True)
    rows = [{**asdict(row), "hit_rate": row.hit_rate} for row in found.rows]
    if as_json:
        tables.write_json("store stats", None, rows)
        return
    out = tables.console()
    cells = [
        (repr(r["namespace"]), r["model"], r["dtype"], str(r["store_bits"]), str(r["block_size"]),
         str(r["format_version"]), str(r["chunks"]), figures.size(r["bytes"]),
         figures.percent(r["hit_rate"]), str(r["evicted"]), str(r["corrupt"]))
        for r in rows
    ]  # fmt: skip
    titles = (
        "namespace", "model", "dtype", "bits", "block\nsize", "for-\nmat", "chunks", "bytes",
        "hits", "evicted", "damaged",
    )  # fmt: skip
    out.print(tables.table(titles, cells, left=3, gap=1))
    limit = "" if found.max_bytes is None else f" of {figures.size(found.max_bytes)}"
    out.print(f"\n{found.n_chunks} chunks, {figures.size(found.bytes)}{limit} in {store.path}")


@app.command()
def sync(
    folder: args.Folder = Path(".samkv"), collections: args.Collections = None,
    chroma: args.ChromaServer = None,
    model: args.ModelName = "builtin", device: args.Device = "auto", dtype: args.Dtype = "auto",
    store_bits: args.CacheBits = None, grace_s: args.Grace = 3600.0,
    prune: args.Prune = True, build: args.Build = True, namespace: args.Namespace = "",
    remote: args.Remote = None, as_json: args.Json = False,
) -> None:  # fmt: skip
    """Bring caches into line with the records: build what is missing, delete what nothing uses."""
    database = Database(folder / "chroma", chroma)
    names = list(dict.fromkeys(collections or ())) or database.names()
    if not names:
        raise EmptyInput(f"{database} holds no collection; ingest documents first")
    opened = [database.collection(name) for name in names]
    engine = engine_of(
        model, folder / "kv", device, dtype, store_bits, namespace=namespace, remote=remote
    )
    require_own_records(store_in(folder, namespace), database, names)
    engine.store.require(engine.fingerprint)
    # What nothing uses belongs to no collection: it is looked for once, when all have been read.
    done = [
        ChromaLink(one, engine).sync(
            build_missing=build, prune=prune and one is opened[-1], grace_s=grace_s, progress=True
        )
        for one in opened
    ]
    if as_json:
        rows = [{"collection": name, **asdict(row)} for name, row in zip(names, done, strict=True)]
        tables.write_json("store sync", model, rows)
    else:
        _show_sync(names, done, pruned=prune)


@app.command()
def forget(
    files: args.DeletedFiles = None, texts: args.DeletedTexts = None,
    folder: args.Folder = Path(".samkv"), namespace: args.Namespace = "",
    remote: args.Remote = None, as_json: args.Json = False,
) -> None:  # fmt: skip
    """Delete caches and texts of deleted documents, whatever model they are of. Loads no model.

    Records of a vector store stay: delete those first, or they are cached again.
    """
    documents = [read_text(file) for file in files or ()]
    bodies = {normalise(text) for text in texts or ()} - {""}
    if not documents and not bodies:
        raise EmptyInput("nothing to forget; name the files of documents, or give --text")
    store = store_in(folder, namespace, remote)
    n_chunks = store.forget(
        lambda body: body in bodies or bool(body) and any(body in text for text in documents)
    )
    if as_json:
        tables.write_json("store forget", None, [{"n_chunks": n_chunks}])
        return
    tables.console().print(
        f"{n_chunks} chunks deleted from {store.path}; records of a vector store are not touched"
    )


for command in (gc, verify, budget, warm, push, pull):
    app.command()(command)


def _show_sync(names: Sequence[str], done: Sequence[SyncResult], *, pruned: bool) -> None:
    out = tables.console()
    columns = ("collection", "records", "cached", "linked", "skipped", "evicted")
    cells = [
        (name, *map(str, (r.n_records, r.n_cached, r.n_linked, r.n_skipped, r.n_evicted)))
        for name, r in zip(names, done, strict=True)
    ]
    out.print(tables.table(columns, cells))
    if pruned:
        last = done[-1]
        out.print(f"\n{last.n_pruned} unused caches deleted ({figures.size(last.bytes_freed)}), "
                  f"{last.n_in_grace} kept for now because they are young")  # fmt: skip
