"""``samkv ingest``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from samkv_integrations import figures
from samkv_integrations.chroma.client import Database
from samkv_integrations.chroma.link import ChromaLink
from samkv_integrations.chroma.records import IngestResult
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli.cluster import failed_rows, pool_of, show_summary
from samkv_integrations.cli.documents import Read, Skipped, find_documents, read_chunks
from samkv_integrations.cli.loading import engine_of
from samkv_integrations.cli.sizes import bytes_of
from samkv_integrations.cluster.ingest import ClusterIngest
from samkv_integrations.cluster.pool import WorkerPool
from samkv_integrations.cluster.records import add_on_ray
from samkv_integrations.embedding import HashingEmbedding
from samkv_integrations.frameworks.engine_args import ModelSource

SOME_UNREADABLE = 1
"""Exit code if documents were left out because they cannot be read, or chunks not cached."""

SHOWN_SKIPPED = 10


def ingest(
    paths: args.Paths,
    collection: args.Collection = "documents", folder: args.Folder = Path(".samkv"),
    chroma: args.ChromaServer = None,
    model: args.ModelName = "builtin", device: args.Device = "auto", dtype: args.Dtype = "auto",
    store_bits: args.CacheBits = None, chunk_size: args.ChunkSize = 512,
    max_bytes: args.IngestBudget = None, namespace: args.Namespace = "",
    remote: args.Remote = None, on_ray: args.OnRay = False, ray_address: args.RayAddress = None,
    workers: args.Workers = None, worker_cpus: args.WorkerCpus = None,
    worker_gpus: args.WorkerGpus = None, as_json: args.Json = False,
) -> None:  # fmt: skip
    """Read documents once, and keep what the model made of them.

    Links in folders are not followed. Exit code 1 if a document cannot be read, or a chunk not be
    cached; the others are ingested.
    """
    pool = pool_of(on_ray, ray_address, workers, worker_cpus, worker_gpus)
    database = Database(folder / "chroma", chroma)
    found = find_documents(paths, leave_out=folder)
    limit = None if max_bytes is None else bytes_of("--max-bytes", max_bytes)
    # where workers compute, this process only reads texts
    here = device if pool is None else "cpu"
    engine = engine_of(model, folder / "kv", here, dtype, store_bits, limit, namespace, remote)
    read = read_chunks(found.files, engine.model, chunk_size)
    link = ChromaLink(database.collection(collection, create=True), engine)
    source = ModelSource(
        model_name=model, device_map=device, dtype=dtype, kv_dir=folder / "kv",
        namespace=namespace, store_bits=engine.store_bits, max_bytes=limit, kv_remote=remote,
    )  # fmt: skip
    done = _add(link, read, None if pool is None else (source, pool))
    _delete_outdated(link, read)
    skipped = [*found.skipped, *read.skipped]
    _show_skipped(skipped)
    if as_json:
        _write_json(done, read, skipped, {"model": model, "collection": collection})
    else:
        _show(done, read, collection)
    failed = isinstance(done, ClusterIngest) and done.failed
    if failed or any(one.is_failure for one in skipped):
        raise typer.Exit(SOME_UNREADABLE)


def _add(
    link: ChromaLink, read: Read, on_ray: tuple[ModelSource, WorkerPool] | None
) -> IngestResult | ClusterIngest:
    """Cache the chunks and write their records, by this process or by workers."""
    ids, texts = [chunk.id for chunk in read.chunks], [chunk.text for chunk in read.chunks]
    embeddings = HashingEmbedding().embed(texts)
    rows = [{"source": chunk.source} for chunk in read.chunks]
    if on_ray is None:
        return link.add(ids, texts, embeddings, rows, progress=True)
    source, pool = on_ray
    with redirect_stdout(sys.stderr):  # Ray writes there of a worker that ends, between our JSON
        return add_on_ray(link, source, ids, texts, embeddings, rows, pool=pool, progress=True)


def _show(done: IngestResult | ClusterIngest, read: Read, collection: str) -> None:
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
    if isinstance(done, ClusterIngest):
        show_summary(done, read.chunks)


def _write_json(
    done: IngestResult | ClusterIngest,
    read: Read,
    skipped: Sequence[Skipped],
    named: Mapping[str, str],
) -> None:
    row: dict[str, Any] = {
        "collection": named["collection"],
        "files": len(read.sources),
        "skipped": [{"path": str(one.path), "why": one.why} for one in skipped],
        **asdict(done),
    }
    if isinstance(done, ClusterIngest):
        row |= {"n_records": done.n_records, "failed": failed_rows(done, read.chunks)}
    tables.write_json("ingest", named["model"], [row])


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
