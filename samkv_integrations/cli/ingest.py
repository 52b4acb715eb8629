"""``samkv ingest``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from samkv_integrations import figures
from samkv_integrations.cache.quantise import DEFAULT_STORE_BITS
from samkv_integrations.chroma.client import open_collection
from samkv_integrations.chroma.link import ChromaLink
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli.documents import Read, Skipped, find_documents, read_chunks
from samkv_integrations.cli.loading import engine_of
from samkv_integrations.cli.sizes import bytes_of
from samkv_integrations.embedding import HashingEmbedding

SOME_UNREADABLE = 1
"""Exit code if documents were left out because they cannot be read."""

SHOWN_SKIPPED = 10


def ingest(
    paths: args.Paths,
    collection: args.Collection = "documents", folder: args.Folder = Path(".samkv"),
    model: args.ModelName = "builtin", device: args.Device = "auto", dtype: args.Dtype = "auto",
    store_bits: args.StoreBits = DEFAULT_STORE_BITS, chunk_size: args.ChunkSize = 512,
    max_bytes: args.IngestBudget = None, namespace: args.Namespace = "",
    remote: args.Remote = None, as_json: args.Json = False,
) -> None:  # fmt: skip
    """Read documents once, and keep what the model made of them.

    Links in folders are not followed. Exit code 1 if a document cannot be read; the others are
    ingested.
    """
    found = find_documents(paths, leave_out=folder)
    limit = None if max_bytes is None else bytes_of("--max-bytes", max_bytes)
    engine = engine_of(model, folder / "kv", device, dtype, store_bits, limit, namespace, remote)
    read = read_chunks(found.files, engine.model, chunk_size)
    chunks, skipped = read.chunks, [*found.skipped, *read.skipped]
    opened = open_collection(folder / "chroma", collection, create=True)
    texts = [chunk.text for chunk in chunks]
    link = ChromaLink(opened, engine)
    done = link.add(
        [chunk.id for chunk in chunks],
        texts,
        HashingEmbedding().embed(texts),
        [{"source": chunk.source} for chunk in chunks],
        progress=True,
    )
    _delete_outdated(link, read)
    _show_skipped(skipped)
    if as_json:
        left_out = [{"path": str(one.path), "why": one.why} for one in skipped]
        row = {"collection": collection, "files": len(read.sources), "skipped": left_out}
        row |= asdict(done)
        tables.write_json("ingest", model, [row])
    else:
        out = tables.console()
        out.print(
            f"{len(read.sources)} files, {done.n_records} chunks in collection {collection!r}: "
            f"{done.n_cached} prefilled, {done.n_hit} already cached"
        )
        out.print(f"{figures.seconds(done.seconds)}, {figures.size(done.bytes_on_disk)} added")
        if done.n_evicted:
            out.print(
                f"{done.n_evicted} of these chunks had to make room again, and will be computed "
                "when they are asked for; 'samkv store budget' gives more room"
            )
    if any(one.is_failure for one in skipped):
        raise typer.Exit(SOME_UNREADABLE)


def _show_skipped(skipped: Sequence[Skipped]) -> None:
    """A line each, on standard error, but not thousands."""
    out = tables.console(stderr=True)
    for one in skipped[:SHOWN_SKIPPED]:
        out.print(f"skipped {one.path}: {one.why}", soft_wrap=True)
    if len(skipped) > SHOWN_SKIPPED:
        out.print(f"skipped {len(skipped)} files in all; --json names each")


def _delete_outdated(link: ChromaLink, read: Read) -> None:
    """Delete the records, and caches, of chunks that the ingested files no longer have."""
    where: Any = {"source": {"$in": list(read.sources)}}
    held = link.collection.get(where=where, include=[])["ids"]
    if outdated := sorted(set(held) - {chunk.id for chunk in read.chunks}):
        link.delete(ids=outdated)
