"""``samkv ingest``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from samkv_integrations import figures
from samkv_integrations.cache.quantise import DEFAULT_STORE_BITS
from samkv_integrations.chroma.client import open_collection
from samkv_integrations.chroma.link import ChromaLink
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli.documents import DocumentChunk, find_documents, read_chunks
from samkv_integrations.cli.loading import engine_of
from samkv_integrations.embedding import HashingEmbedding


def ingest(
    paths: args.Paths,
    collection: args.Collection = "documents", folder: args.Folder = Path(".samkv"),
    model: args.ModelName = "builtin", device: args.Device = "auto", dtype: args.Dtype = "auto",
    store_bits: args.StoreBits = DEFAULT_STORE_BITS, chunk_size: args.ChunkSize = 512,
    as_json: args.Json = False,
) -> None:  # fmt: skip
    """Read documents once, and keep what the model made of them."""
    files = find_documents(paths, leave_out=folder)
    engine = engine_of(model, folder / "kv", device, dtype, store_bits)
    chunks = read_chunks(files, engine.model, chunk_size)
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
    _delete_outdated(link, chunks)
    if as_json:
        row = {"collection": collection, "files": len(files), **asdict(done)}
        tables.write_json("ingest", model, [row])
    else:
        out = tables.console()
        out.print(f"{len(files)} files, {done.n_records} chunks in collection {collection!r}: "
                  f"{done.n_cached} prefilled, {done.n_hit} already cached")  # fmt: skip
        out.print(f"{figures.seconds(done.seconds)}, {figures.size(done.bytes_on_disk)} added")


def _delete_outdated(link: ChromaLink, chunks: Sequence[DocumentChunk]) -> None:
    """Delete the records, and caches, of chunks that the ingested files no longer have."""
    sources = list({chunk.source for chunk in chunks})
    where: Any = {"source": {"$in": sources}}
    held = link.collection.get(where=where, include=[])["ids"]
    if outdated := sorted(set(held) - {chunk.id for chunk in chunks}):
        link.delete(ids=outdated)
