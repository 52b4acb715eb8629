"""``samkv store export`` and ``samkv store import``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from samkv_integrations.cache.archive import export_caches, import_caches
from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.chroma.client import Database
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli.loading import engine_of, keys_of, progress_bar, store_in
from samkv_integrations.errors import InvalidOption
from samkv_integrations.figures import size


def export(
    file: args.NewArchive, folder: args.Folder = Path(".samkv"),
    collections: args.Collections = None, chroma: args.ChromaServer = None,
    namespace: args.Namespace = "", as_json: args.Json = False,
) -> None:  # fmt: skip
    """Write caches, with their texts, into one file that another machine can import.

    It is as confidential as the documents. Records of the vector store are not in it.
    """
    store = store_in(folder, namespace)
    keys = keys_of(Database(folder / "chroma", chroma), collections)
    with progress_bar("exporting") as show:
        done = export_caches(store, file, keys, progress=show)
    if as_json:
        tables.write_json("store export", None, [asdict(done)])
        return
    left_out = f", {done.n_left_out} damaged ones left out" if done.n_left_out else ""
    tables.console().print(
        f"{done.n_chunks} caches written to {file} ({size(done.bytes_written)}){left_out}"
    )


def import_(
    file: args.Archive, folder: args.Folder = Path(".samkv"), namespace: args.Namespace = "",
    model: args.OnlyModel = None, device: args.Device = "auto", dtype: args.Dtype = "auto",
    store_bits: args.CacheBits = None, as_json: args.Json = False,
) -> None:  # fmt: skip
    """Take over the caches of a file that 'samkv store export' wrote, each verified.

    Import what you trust: its maker decides what a model reads for these texts. Ingest the
    documents here too; their caches are found.
    """
    path = folder / "kv"
    if not file.is_file():  # before a store is made
        raise InvalidOption(f"{file} cannot be read; name a file that 'samkv store export' wrote")
    fingerprint = None
    if model is not None:
        fingerprint = engine_of(model, path, device, dtype, store_bits).fingerprint
    path.parent.mkdir(parents=True, exist_ok=True)
    store = ChunkStore(path, namespace=namespace)
    with progress_bar("importing", "B") as show:
        done = import_caches(store, file, fingerprint=fingerprint, progress=show)
    if as_json:
        tables.write_json("store import", model, [asdict(done)])
        return
    of_others = f", {done.n_other} of other models left out" if done.n_other else ""
    tables.console().print(
        f"{done.n_chunks} caches imported, {done.n_known} were here already, {done.n_damaged} "
        f"damaged{of_others}"
    )
