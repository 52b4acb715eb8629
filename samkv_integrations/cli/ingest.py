"""``samkv ingest`` and ``samkv remove``: read documents into chunks, and delete them."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import formatting, tables
from samkv_integrations.cli.formatting import count
from samkv_integrations.cli.loading import Collections, Embedded, Index, Ingested, remember
from samkv_integrations.errors import EmptyInput, InvalidOption
from samkv_integrations.ingest.documents import CODE
from samkv_integrations.ingest.finding import Found, find_documents
from samkv_integrations.option import check_options
from samkv_integrations.options import StoreOptions

if TYPE_CHECKING:
    from samkv_integrations.chroma.embedding import LearnedEmbedding
    from samkv_integrations.chroma.link import ChromaLink
    from samkv_integrations.chroma.records import IngestResult
    from samkv_integrations.engine import Engine
    from samkv_integrations.frameworks.engine_args import ModelSource
    from samkv_integrations.ingest.chunks import ChunkReader
    from samkv_integrations.ingest.cluster import ClusterIngest, WorkerPool
    from samkv_integrations.store.disk import ChunkStore

SOME_UNREADABLE = 1
"""Exit code if a document cannot be read, or a chunk cannot be cached."""

SHOWN_SKIPPED = 10
SHOWN_KINDS = 10

Paths = Annotated[
    list[Path],
    typer.Argument(
        exists=True,
        readable=False,
        help="Files or folders: text, Markdown, PDF, HTML, DOCX, PPTX, XLSX, EPUB, e-mail.",
    ),
]
RemovedPaths = Annotated[
    list[Path], typer.Argument(help="Ingested files or folders, which need not exist any more.")
]
_BUDGET = "Most bytes of all caches on disk from now on: 20GB."

_OVERLAP = "Most tokens with which a chunk repeats the end of the one before."

_CODE = "In folders, read source code, configuration and JSON as well."


@dataclass(frozen=True, kw_only=True)
class OnRay:
    """The options that say where chunks are computed: in this process, or by workers on Ray."""

    on_ray: Annotated[
        bool,
        typer.Option("--ray", help="Use several workers on Ray, each of which loads the model."),
    ] = False
    ray_address: Annotated[
        str | None,
        typer.Option(
            hidden=True, help="HOST:PORT of a Ray cluster, or auto. Default: this machine only."
        ),
    ] = None
    workers: Annotated[int | None, typer.Option(min=1, help="Workers on Ray. [default: 2]")] = None
    worker_cpus: Annotated[
        int | None, typer.Option(min=1, hidden=True, help="CPUs of each. [default: 1]")
    ] = None
    worker_gpus: Annotated[
        float | None, typer.Option(min=0, hidden=True, help="GPUs of each. [default: 0]")
    ] = None

    @property
    def pool(self) -> WorkerPool | None:
        """The workers; None without ``--ray``.

        Raises:
            InvalidOption: an option has a wrong value, or has no effect without ``--ray``.
            MissingExtra: Ray is not installed.
        """
        if self.on_ray:
            from samkv_integrations.ingest.cluster import WorkerPool, require_ray

            require_ray()
            return WorkerPool(
                n_workers=self.workers or 2, n_cpus=self.worker_cpus or 1,
                n_gpus=self.worker_gpus or 0.0, address=self.ray_address,
            )  # fmt: skip
        for name, value in vars(self).items():
            if value is not None and name != "on_ray":
                flag = f"--{name.replace('_', '-')} {value}"
                raise InvalidOption(f"{flag} has no effect without --ray; give --ray too")
        return None


@dataclass(frozen=True, kw_only=True)
class Reading(args.Converting):
    """The options that say which documents are read, and how."""

    code: Annotated[bool, args.of_reading("--code", help=_CODE)] = False


def ingest(
    paths: Paths, index: Index, ray: OnRay, reading: Reading, embedded: Embedded,
    collection: args.Collection = "documents",
    chunk_size: Annotated[int, typer.Option(help="Most tokens of a chunk.", min=1)] = 512,
    overlap: Annotated[int, args.of_reading(help=_OVERLAP)] = 0,
    max_bytes: Annotated[str | None, typer.Option(help=_BUDGET)] = None, as_json: args.Json = False,
) -> None:  # fmt: skip
    """Read documents, and cache the KV entries of their chunks.

    --store-bits 8 or 16 keeps finer caches than 4 bits. Links in folders are not followed. Exit
    code 1 if a document cannot be read, or a chunk cannot be cached; the others are ingested.
    """
    began = time.perf_counter()
    # raises before anything slow is imported
    found = find_documents(paths, leave_out=index.folder, with_code=reading.code)
    pool, limits = ray.pool, reading.limits
    check_options(StoreOptions, {"max_bytes": max_bytes})

    from samkv_integrations.chroma.client import check_name
    from samkv_integrations.ingest.splitting import check_overlap

    check_name(collection)
    check_overlap(overlap, chunk_size)

    from samkv_integrations.frameworks.engine_args import engine_of
    from samkv_integrations.ingest.chunks import ChunkReader

    is_new = True
    with suppress(InvalidOption):  # without a database
        is_new = collection not in index.database.names()
    embedding = embedded.embeddings.to_ingest(index.database, collection)
    before = index.as_ingested([(index.namespace, collection)], may_be_new=is_new)
    source = index.source(before, max_bytes)
    # where workers compute, this process only reads texts
    engine = engine_of(source if pool is None else source.model_copy(update={"device_map": "cpu"}))
    if chunk_size > (most := engine.chunks.room):
        raise InvalidOption(
            f"--chunk-size {chunk_size}; {before.model} has room for {most} at most"
        )
    target = _Target(index, collection, engine, before, embedding, is_new=is_new)
    chunks = ChunkReader(
        found.files, engine.model, chunk_size, overlap=overlap, limits=limits,
        encoding=reading.encoding,
    )  # fmt: skip
    failed: list[dict[str, str]] = []
    try:
        if pool is None:
            done = _add_while_reading(chunks, target, shows_bar=not as_json)
        else:
            done, failed = _add_by_workers(chunks, target, source, pool, shows_bar=not as_json)
    except KeyboardInterrupt:
        said = "interrupted; caches made so far stay, and the same command continues"
        tables.console(stderr=True).print(said)
        raise
    target.delete_outdated(chunks.n_chunks)
    if done is None:
        why = "".join(f"; {one.path}: {one.why}" for one in chunks.skipped if one.is_failure)
        n_files = count(len(found.files), "document")
        raise EmptyInput(f"no text in {n_files}{why}; give some with text")
    _report(found, chunks, target, done, failed, time.perf_counter() - began, as_json=as_json)


class _Target:
    """The collection that documents are added to, and the settings that are remembered for it."""

    def __init__(
        self, index: Index, name: str, engine: Engine, given: Ingested,
        embedding: LearnedEmbedding | None, *, is_new: bool,
    ) -> None:  # fmt: skip
        """Opens the collection, unless it is new: then `link` makes it, when there is a text.

        given: the settings of this ingest.
        """
        from samkv_integrations.chroma.embedding import HashingEmbedding
        from samkv_integrations.chroma.records import Records
        from samkv_integrations.runtimes import runtime_for

        self._index, self.name, self.engine, self.embedding = index, name, engine, embedding
        kind = runtime_for(given.model, given.runtime)
        dtype = engine.model.dtype_name if "dtype" in kind.options else "auto"
        self.settings = Ingested(
            model=given.model, runtime=kind.name, dtype=dtype, store_bits=engine.store_bits
        )
        self.former: Ingested | None = None
        self._is_new, self._is_remembered = is_new, False
        self._link: ChromaLink | None = None
        if not is_new:
            opened = self.link().collection
            if embedding is None:  # another one has been tried
                Records(opened).check_sizes(HashingEmbedding().embed([""]))

    def link(self) -> ChromaLink:
        """The collection, which is made if it is new."""
        from samkv_integrations.chroma.embedding import open_remembering
        from samkv_integrations.chroma.link import ChromaLink

        if self._link is None:
            opened = open_remembering(self._index.database, self.name, self.embedding)
            self._link = ChromaLink(opened, self.engine, self.embedding)
            if self._is_new:  # so that other commands know the model if this one is killed
                self.remember()
        return self._link

    def remember(self) -> None:
        """Remember the settings, once something was written with them."""
        if not self._is_remembered:
            place = self._index.namespace, self.name
            self.former = remember(self._index.kv, self.engine.store, place, self.settings)
            self._is_remembered = True

    def delete_outdated(self, n_chunks: Mapping[str, int]) -> None:
        """Delete records and caches of chunks that the documents no longer contain.

        n_chunks: document that was read -> number of its chunks.
        """
        from samkv_integrations.chroma.records import PAGE_SIZE, Records

        if self._link is None:
            return
        sources, outdated = list(n_chunks), list[str]()
        for at in range(0, len(sources), PAGE_SIZE):
            part = sources[at : at + PAGE_SIZE]
            present = Records(self._link.collection).ids({"source": {"$in": part}})
            outdated += set(present).difference(
                f"{source}#{number}" for source in part for number in range(n_chunks[source])
            )
        if outdated:
            self._link.delete(ids=sorted(outdated))


def _add_while_reading(
    chunks: ChunkReader, target: _Target, *, shows_bar: bool
) -> IngestResult | None:
    """Cache and record the chunks page by page, as they are read; None if there is no text."""
    from samkv_integrations.chroma.link import Adding
    from samkv_integrations.cli.progress import IngestBar

    adding: Adding | None = None
    with (
        IngestBar(len(chunks.files), chunks.n_bytes, is_shown=shows_bar) as bar,
        closing(chunks.pages()) as pages,
    ):
        for page in pages:
            link = target.link()
            adding = adding or Adding(link)
            vectors = link.vectors(page.ids, page.texts)
            found = adding.check(page.ids, page.texts, vectors, page.rows)
            bar.begin(page, found.chunks)
            adding.write(found, on_written=bar.update)
            bar.end(page)
            target.remember()
    return None if adding is None else adding.finish()


def _add_by_workers(
    chunks: ChunkReader, target: _Target, source: ModelSource, pool: WorkerPool, *,
    shows_bar: bool,
) -> tuple[ClusterIngest | None, list[dict[str, str]]]:  # fmt: skip
    """Read all chunks, and let workers cache them; also the chunks that cannot be cached."""
    from samkv_integrations.ingest.cluster import add_on_ray

    read = chunks.all()
    if not read.ids:
        return None, []
    link, progress = target.link(), shows_bar and sys.stderr.isatty()
    vectors = link.vectors(read.ids, read.texts, progress=progress)
    with redirect_stdout(sys.stderr):  # Ray prints the output of a worker that ends
        done = add_on_ray(
            link, source, read.ids, read.texts, vectors, read.rows, pool=pool, progress=progress
        )
    target.remember()
    return done, [{"id": read.ids[at], "why": why} for at, why in done.failed.items()]


def _report(
    found: Found, chunks: ChunkReader, target: _Target, done: IngestResult,
    failed: Sequence[Mapping[str, str]], seconds: float, *, as_json: bool,
) -> None:  # fmt: skip
    """Tell what was ingested and what was not. Exits with `SOME_UNREADABLE` if that is an error."""
    from samkv_integrations.ingest.cluster import ClusterIngest

    skipped, model = [*found.skipped, *chunks.skipped], target.settings.model
    left_out = [f"skipped {one.path}: {one.why}" for one in skipped]
    left_out += [f"not ingested: {one['id']}: {one['why']}" for one in failed]
    notes = left_out[:SHOWN_SKIPPED]
    if len(left_out) > SHOWN_SKIPPED:
        notes.append(f"{len(left_out)} files and chunks were left out in all; --json names each")
    if model == "builtin":
        notes.append(
            "the built-in model is for tests: it knows the sample documents only; for others give "
            "--model, such as smollm2"
        )
    n_chunks = sum(chunks.n_chunks.values())
    is_other = target.former not in (None, target.settings)
    if is_other and target.link().collection.count() > n_chunks:
        notes.append(
            f"the other documents of {target.name!r} have caches of other settings, which "
            "'samkv ask' cannot use; 'samkv store sync' computes them again"
        )
    if chunks.encodings:
        kinds = _most_frequent(chunks.encodings)
        notes.append(f"files in other encodings than UTF-8: {kinds}; --encoding names another one")
    if found.others:
        code = "; --code reads source code and data, too" if {*found.others} & {*CODE} else ""
        kinds = _most_frequent(found.others)
        notes.append(f"files of other kinds were left out: {kinds}{code}")
    for line in notes:
        tables.console(stderr=True).print(formatting.in_one_line(line), soft_wrap=True)
    n_read = sum(n > 0 for n in chunks.n_chunks.values())
    row = {"files": n_read, **asdict(done), "collection": target.name}
    row["skipped"] = [{"path": str(one.path), "why": one.why} for one in skipped]
    n_repeated = done.n_records - done.n_cached - done.n_hit
    lines = [
        f"{count(n_read, 'file')}, {count(done.n_records, 'chunk')} in collection "
        f"{target.name!r}: {done.n_cached} prefilled by {model}, {done.n_hit} already cached"
        + (f", {n_repeated} repeated" if n_repeated else ""),
        f"{formatting.seconds(seconds)}, of which "
        f"{formatting.seconds(done.seconds)} for caches and records; "
        f"{formatting.size(done.bytes_on_disk)} added",
    ]
    if target.embedding is not None:
        lines.append(f"found by words, and by vectors of {target.embedding.name}")
    if done.n_released:
        lines.append(f"{count(done.n_released, 'replaced cache')} deleted")
    if done.n_evicted:
        lines.append(
            f"{done.n_evicted} of these chunks were evicted to make room; raise the limit with "
            "'samkv store budget'"
        )
    rows = [row | ({"failed": failed} if isinstance(done, ClusterIngest) else {})]
    tables.report("ingest", model, rows, *lines, as_json=as_json)
    if failed or any(one.is_failure for one in skipped):
        raise typer.Exit(SOME_UNREADABLE)


def _most_frequent(numbers: Counter[str]) -> str:
    """The most frequent ones with their numbers, and how many others there are."""
    shown = numbers.most_common(SHOWN_KINDS)
    said = [f"{n} {kind[:40]}" for kind, n in sorted(shown)]
    if n_others := len(numbers) - len(shown):
        said.append(f"{numbers.total() - sum(n for _, n in shown)} of {n_others} other kinds")
    return ", ".join(said)


class _StoreAlone:
    """Replaces the engine of a link that only deletes, so that no model is loaded."""

    def __init__(self, store: ChunkStore) -> None:
        self.store = store

    def delete(self, keys: Collection[str], *, is_final: bool = True) -> int:
        return self.store.delete(*keys)


def remove(
    paths: RemovedPaths, where: Collections, collection: args.Collection = "documents",
    as_json: args.Json = False,
) -> None:  # fmt: skip
    """Delete the records of documents, and the caches that no other record uses.

    Loads no model. The files stay, and need not exist.
    """
    from samkv_integrations.chroma.link import ChromaLink
    from samkv_integrations.chroma.records import Records

    database = where.database
    opened, store = database.collection(collection), where.store()
    where.require_own_records(database, [collection])
    wanted = {path.resolve() for path in paths}  # as in the records
    matched, sources, ids = set[Path](), set[str](), list[str]()
    for id_, source in Records(opened).sources():
        if found := wanted & {Path(source), *Path(source).parents}:
            matched |= found
            sources.add(source)
            ids.append(id_)
    if not ids:
        raise EmptyInput(
            f"collection {collection!r} has no record of {', '.join(map(str, paths))}; name "
            "files or folders that 'samkv ingest' has read into it"
        )
    n_chunks = ChromaLink(opened, cast("Engine", _StoreAlone(store))).delete(ids)
    unknown = [str(path) for path in paths if path.resolve() not in matched]
    for path in unknown:
        tables.console(stderr=True).print(f"no record is of {path}", soft_wrap=True)
    row: dict[str, Any] = {"files": len(sources), "n_records": len(ids), "n_chunks": n_chunks}
    row |= {"collection": collection, "unknown": unknown}
    said = (
        f"{count(len(sources), 'file')}, {count(len(ids), 'record')} removed from "
        f"collection {collection!r}, {count(n_chunks, 'cache')} deleted"
        + ("; a cache stays as long as another record has its text" if n_chunks < len(ids) else "")
    )
    tables.report("remove", None, [row], said, as_json=as_json)
