"""``samkv ingest`` and ``samkv remove``: read documents into chunks, and delete them."""

from __future__ import annotations

import os
import re
import sys
import time
from codecs import lookup
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import formatting, tables
from samkv_integrations.cli.formatting import count
from samkv_integrations.cli.loading import Collections, Embedded, Index, Ingested, remember
from samkv_integrations.errors import (
    EmptyInput,
    Given,
    InvalidOption,
    MissingExtra,
    UnknownOption,
)
from samkv_integrations.ingest.documents import SUFFIXES, UTF_8, Document
from samkv_integrations.option import bytes_of, check_options
from samkv_integrations.options import StoreOptions

if TYPE_CHECKING:
    from samkv_integrations.chroma.link import ChromaLink
    from samkv_integrations.chroma.records import IngestResult
    from samkv_integrations.engine import Engine
    from samkv_integrations.ingest.cluster import WorkerPool
    from samkv_integrations.ingest.reader import ReadLimits
    from samkv_integrations.runtimes.base import Runtime
    from samkv_integrations.store.disk import ChunkStore

SOME_UNREADABLE = 1
"""Exit code if a document cannot be read, or a chunk cannot be cached."""

SHOWN_SKIPPED = 10

Paths = Annotated[
    list[Path],
    typer.Argument(
        exists=True,
        readable=False,
        help="Files or folders of text, Markdown, PDF, HTML, DOCX, PPTX, CSV.",
    ),
]
RemovedPaths = Annotated[
    list[Path], typer.Argument(help="Ingested files or folders, which need not exist any more.")
]
_BUDGET = "Most bytes of all caches on disk from now on: 20GB."

_LINK = "symbolic links in folders are not followed; name the target"


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A file that is not ingested. is_failure: whether this is an error, rather than by design."""

    path: Path
    why: str
    is_failure: bool = False


@dataclass(frozen=True, kw_only=True)
class Found:
    """The documents that were found: real paths, sorted and distinct.

    others: suffix -> number of files in folders that have an unknown suffix.
    """

    files: Sequence[Path]
    skipped: Sequence[Skipped] = ()
    others: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Read:
    """The chunks of documents, as ids, texts and metadata of records.

    An id is ``PATH#NUMBER``, the same in every ingest. sources: all documents that were read, even
    without text. encodings: number of files in each encoding other than UTF-8.
    """

    ids: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    encodings: Counter[str] = field(default_factory=Counter)


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
class Reading:
    """The options that say how documents are read."""

    encoding: Annotated[
        str | None, args.further(help="Of files of text, such as cp1252. Default: detected.")
    ] = None
    max_file: Annotated[str, args.further(help="Most bytes of a file.")] = "200MB"
    max_text: Annotated[str, args.further(help="Most bytes of the text of a file.")] = "50MB"
    read_seconds: Annotated[
        float, args.further(min=0.1, help="Most seconds to convert a file to text.")
    ] = 60.0
    read_memory: Annotated[str, args.further(help="Most memory to convert a file to text.")] = "2GB"

    def __post_init__(self) -> None:
        if self.encoding is not None:
            try:
                lookup(self.encoding)
            except (LookupError, ValueError) as error:
                raise InvalidOption(
                    Given("encoding", self.encoding), "; it must be one that Python knows"
                ) from error

    @property
    def limits(self) -> ReadLimits:
        """Raises InvalidOption if a size is none."""
        from samkv_integrations.ingest.reader import ReadLimits

        return ReadLimits(
            file_bytes=bytes_of("max_file", self.max_file),
            text_bytes=bytes_of("max_text", self.max_text),
            seconds=self.read_seconds,
            memory_bytes=bytes_of("read_memory", self.read_memory),
        )


def ingest(
    paths: Paths, index: Index, ray: OnRay, reading: Reading, embedded: Embedded,
    collection: args.Collection = "documents",
    chunk_size: Annotated[int, typer.Option(help="Most tokens of a chunk.", min=1)] = 512,
    max_bytes: Annotated[str | None, typer.Option(help=_BUDGET)] = None, as_json: args.Json = False,
) -> None:  # fmt: skip
    """Read documents, and cache the KV entries of their chunks.

    --store-bits 8 or 16 keeps finer caches than 4 bits. Links in folders are not followed. Exit
    code 1 if a document cannot be read, or a chunk cannot be cached; the others are ingested.
    """
    began, folder = time.perf_counter(), index.folder
    # raises before anything slow is imported
    found, pool, limits = find_documents(paths, leave_out=folder), ray.pool, reading.limits
    check_options(StoreOptions, {"max_bytes": max_bytes})

    from samkv_integrations.chroma.client import check_name

    check_name(collection)

    from samkv_integrations.chroma.embedding import open_remembering
    from samkv_integrations.chroma.link import ChromaLink
    from samkv_integrations.frameworks.engine_args import engine_of
    from samkv_integrations.ingest.cluster import add_on_ray
    from samkv_integrations.runtimes import runtime_for

    database, place = index.database, (index.namespace, collection)
    is_new = True
    with suppress(InvalidOption):  # without a database
        is_new = collection not in database.names()
    embedding = embedded.embeddings.to_ingest(database, collection)
    before = index.as_ingested([place], may_be_new=is_new)
    model = before.model
    source = index.source(before, max_bytes)
    # where workers compute, this process only reads texts
    engine = engine_of(source if pool is None else source.model_copy(update={"device_map": "cpu"}))
    if chunk_size > (most := engine.chunks.room):
        raise InvalidOption(f"--chunk-size {chunk_size}; {model} has room for {most} at most")
    read = read_chunks(found.files, engine.model, chunk_size, limits, reading.encoding)
    if not read.texts:
        with suppress(InvalidOption, UnknownOption):  # a new collection is not made
            _delete_outdated(ChromaLink(database.collection(collection), engine), read)
        why = "".join(f"; {one.path}: {one.why}" for one in read.skipped if one.is_failure)
        n_files = count(len(found.files), "document")
        raise EmptyInput(f"no text in {n_files}{why}; give some with text")
    link = ChromaLink(open_remembering(database, collection, embedding), engine, embedding)
    vectors = link.vectors(read.ids, read.texts, progress=True)
    records = read.ids, read.texts, vectors, read.rows
    done: IngestResult
    failed: list[dict[str, str]] = []
    kind, bits = runtime_for(model, before.runtime), engine.store_bits
    dtype = engine.model.dtype_name if "dtype" in kind.options else "auto"
    now = Ingested(model=model, runtime=kind.name, dtype=dtype, store_bits=bits)
    if is_new:  # so that other commands know the model if this one is killed
        remember(index.kv, engine.store, place, now)
    if pool is None:
        try:
            done = link.add(*records, progress=True)
        except KeyboardInterrupt:
            said = "interrupted; caches made so far stay, and the same command continues"
            tables.console(stderr=True).print(said)
            remember(index.kv, engine.store, place, now)
            raise
    else:
        with redirect_stdout(sys.stderr):  # Ray prints the output of a worker that ends
            by_workers = add_on_ray(link, source, *records, pool=pool, progress=True)
        done = by_workers
        failed = [{"id": read.ids[at], "why": why} for at, why in by_workers.failed.items()]
    was = remember(index.kv, engine.store, place, now)
    _delete_outdated(link, read)

    skipped = [*found.skipped, *read.skipped]
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
    if was not in (None, now) and link.collection.count() > len(read.ids):
        notes.append(
            f"the other documents of {collection!r} have caches of other settings, which "
            "'samkv ask' cannot use; 'samkv store sync' computes them again"
        )
    if read.encodings:
        kinds = ", ".join(f"{n} {encoding}" for encoding, n in sorted(read.encodings.items()))
        notes.append(f"files in other encodings than UTF-8: {kinds}; --encoding names another one")
    if found.others:
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(found.others.items()))
        notes.append(f"files of other kinds were left out: {kinds}")
    for line in notes:
        tables.console(stderr=True).print(line, soft_wrap=True)
    n_read = len({row["source"] for row in read.rows})
    row = {"files": n_read, **asdict(done), "collection": collection}
    row["skipped"] = [{"path": str(one.path), "why": one.why} for one in skipped]
    n_repeated = done.n_records - done.n_cached - done.n_hit
    lines = [
        f"{count(n_read, 'file')}, {count(done.n_records, 'chunk')} in collection "
        f"{collection!r}: {done.n_cached} prefilled by {model}, {done.n_hit} already cached"
        + (f", {n_repeated} repeated" if n_repeated else ""),
        f"{formatting.seconds(time.perf_counter() - began)}, of which "
        f"{formatting.seconds(done.seconds)} for caches and records; "
        f"{formatting.size(done.bytes_on_disk)} added",
    ]
    if embedding is not None:
        lines.append(f"found by words, and by vectors of {embedding.name}")
    if done.n_released:
        lines.append(f"{count(done.n_released, 'replaced cache')} deleted")
    if done.n_evicted:
        lines.append(
            f"{done.n_evicted} of these chunks were evicted to make room; raise the limit with "
            "'samkv store budget'"
        )
    rows = [row | ({"failed": failed} if pool else {})]
    tables.report("ingest", model, rows, *lines, as_json=as_json)
    if failed or any(one.is_failure for one in skipped):
        raise typer.Exit(SOME_UNREADABLE)


def _delete_outdated(link: ChromaLink, read: Read) -> None:
    """Delete records and caches of chunks that the documents no longer contain."""
    from samkv_integrations.chroma.records import Records

    where: Any = {"source": {"$in": read.sources}}
    present = Records(link.collection).ids(where)
    if outdated := sorted(set(present) - set(read.ids)):
        link.delete(ids=outdated)


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


def find_documents(paths: Sequence[Path], leave_out: Path | None = None) -> Found:
    """The documents among ``paths``, and in the folders among them.

    In folders only regular files count: a symbolic link may lead to private files. A path itself
    may be a link. Hidden files and folders are ignored.

    leave_out: a folder to ignore.

    Raises:
        InvalidOption: a path is not a regular file or a folder.
        EmptyInput: there is no document.
    """
    found, skipped, others = set[Path](), list[Skipped](), Counter[str]()

    def skip(file: Path, why: str, *, is_failure: bool = False) -> None:
        skipped.append(Skipped(path=file, why=why, is_failure=is_failure))

    def unreadable(error: OSError) -> None:
        skip(Path(str(error.filename)), f"it cannot be read: {error.strerror}", is_failure=True)

    def look_at(file: Path, *, is_named: bool) -> None:
        kind = file.suffix.lower()
        if file.is_symlink() and not is_named and (kind in SUFFIXES or file.is_dir()):
            skip(file, _LINK)
        elif kind not in SUFFIXES and is_named:  # as of a shell's *
            why = f"it is not a document; known kinds: {', '.join(SUFFIXES)}"
            skip(file, why, is_failure=True)
        elif kind not in SUFFIXES:
            others[kind or file.name] += 1
        elif not file.is_file() and is_named:
            raise InvalidOption(f"{file} must be a regular file; give a file with the text")
        elif not file.is_file():
            skip(file, "it is not a regular file")
        elif re.search(r"[\ud800-\udfff]", str(file.resolve())):  # ids of records are text
            skip(file, "its name is not UTF-8", is_failure=True)
        else:
            found.add(file.resolve())

    for path in paths:
        below = _below(path, leave_out, unreadable) if path.is_dir() else [path]
        for file in below:
            try:
                look_at(file, is_named=file is path)
            except OSError as error:  # a folder that may be listed and not entered
                skip(file, f"it cannot be read: {error.strerror}", is_failure=True)
    if not found:
        raise EmptyInput(
            f"no document ({', '.join(SUFFIXES)}) in {', '.join(map(str, paths))}"
            + (f" ({skipped[0].path}: {skipped[0].why})" if skipped else "")
            + "; give a folder that holds some"
        )
    return Found(files=sorted(found), skipped=list(dict.fromkeys(skipped)), others=others)


def _below(
    folder: Path, leave_out: Path | None, onerror: Callable[[OSError], None]
) -> Iterator[Path]:
    """Files in a folder, and links to folders. Hidden ones are ignored, and links not followed."""
    left, ignored = [folder], leave_out and leave_out.resolve()
    while left:  # os.walk calls itself for each folder in a folder
        here = left.pop()
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
            shown = [entry for entry in entries if not entry.name.startswith(".")]
            folders = {entry.name for entry in shown if entry.is_dir(follow_symlinks=False)}
            is_ignored = ignored is not None and here.resolve() == ignored
        except OSError as error:
            onerror(error)
            continue
        if not is_ignored:
            left += [here / name for name in folders]
            yield from (here / entry.name for entry in shown if entry.name not in folders)


def read_chunks(
    files: Sequence[Path], model: Runtime, chunk_size: int, limits: ReadLimits | None = None,
    encoding: str | None = None,
) -> Read:  # fmt: skip
    """The chunks of ``files``, real paths, each of at most ``chunk_size`` tokens of ``model``.

    A file that cannot be read is skipped, so that the others are ingested.

    Raises InvalidOption if no file can be read.
    """
    from samkv_integrations.ingest.reader import DocumentReader, ReadLimits

    read, limits = Read(), limits or ReadLimits()
    with DocumentReader.opened(limits, encoding) as reader:
        for file in files:
            try:
                document = reader.read(file)
            except (InvalidOption, MissingExtra) as error:
                said = str(error)
                why = f"it {said.removeprefix(f'{file} ')}" if said.startswith(str(file)) else said
                read.skipped.append(Skipped(path=file, why=why, is_failure=True))
            else:
                _add_chunks(read, file, document, model, chunk_size)
    if not read.sources:
        first = read.skipped[0]
        raise InvalidOption(
            f"none of {count(len(files), 'document')} can be read; {first.path}: {first.why}"
        )
    return read


def _add_chunks(
    read: Read, file: Path, document: Document, model: Runtime, chunk_size: int
) -> None:
    from samkv_integrations.store.chunk import normalise

    source = str(file)
    read.sources.append(source)
    if document.encoding != UTF_8:
        read.encodings[document.encoding] += 1
    parts = [
        (number, part)
        for number, page in enumerate(document.pages, start=1)
        for part in split(normalise(page), file.suffix, model, chunk_size)
    ]
    if not parts:
        read.skipped.append(Skipped(path=file, why="it holds no text"))
    title = {"title": document.title} if document.title else {}
    for number, (page, part) in enumerate(parts):
        read.ids.append(f"{source}#{number}")
        read.texts.append(part)
        paged = {"page": page} if len(document.pages) > 1 else {}
        read.rows.append({"source": source, **paged, **title})


def split(body: str, suffix: str, model: Runtime, chunk_size: int) -> list[str]:
    """The chunks of a page of a file with this suffix; none if it has no text.

    A short piece, such as a heading, is joined to the piece after it, else to the one before.
    """
    from samkv_integrations.store.chunk import normalise
    from samkv_integrations.store.windows import MIN_RUN

    def n_tokens(text: str) -> int:
        return len(model.tokenize(text, special=False))

    if n_tokens(body) <= chunk_size:
        return [body] if body else []
    try:
        from semantic_text_splitter import MarkdownSplitter, TextSplitter
    except ImportError as error:
        raise MissingExtra.of("semantic-text-splitter", "chroma") from error
    kind = TextSplitter if suffix.lower() in (".txt", ".pdf") else MarkdownSplitter
    few = chunk_size // 8  # each piece leaves room for so many tokens
    fast, size = model.fast_tokenizer, chunk_size - few
    if fast is None:
        splitter = kind.from_callback(n_tokens, size)
    else:
        splitter = kind.from_huggingface_tokenizer(fast, size)
    pieces = [
        (start + at, piece)
        for start, end in _parts(body)
        for at, piece in splitter.chunk_indices(body[start:end])
    ]
    joined: list[tuple[int, int]] = []  # characters from and to, the last piece first
    for begin, piece in reversed(pieces):
        end = begin + len(piece)
        if joined:
            after = body[slice(*joined[-1])]
            is_short = min(n_tokens(piece), n_tokens(after)) < max(MIN_RUN, few)
            if is_short and n_tokens(body[begin : joined[-1][1]]) <= chunk_size:
                end = joined.pop()[1]
        joined.append((begin, end))
    return list(filter(None, (normalise(body[begin:end]) for begin, end in reversed(joined))))


_MOST_UNBROKEN = 2000
"""Most characters of a run without white space that is not cut.

The time of the splitter grows with the square of such a run: 22 s for an image of 400 kB as base64.
"""


def _parts(body: str) -> list[tuple[int, int]]:
    """Where the parts of a text begin and end, so that none has a long run without white space."""
    cuts = [0]
    for run in re.finditer(rf"(?<!\S)\S{{{_MOST_UNBROKEN},}}", body):
        cuts += range(run.start() + _MOST_UNBROKEN, run.end(), _MOST_UNBROKEN)
    return list(pairwise([*cuts, len(body)]))
