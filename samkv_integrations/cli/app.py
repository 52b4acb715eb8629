"""The command line, ``samkv``.

With ``--json`` a command writes one object to standard output and nothing else there; everything
for the eye goes to standard error.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
import typer
import typer.core
from tqdm.auto import tqdm

from samkv_integrations import figures
from samkv_integrations.bench.markdown import table as markdown_table
from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.cache.fingerprint import FORMAT_VERSION
from samkv_integrations.cache.quantise import DEFAULT_STORE_BITS, check_store_bits
from samkv_integrations.chroma.client import collection_names, open_collection
from samkv_integrations.chroma.link import ChromaLink
from samkv_integrations.cli import bench_commands, tables
from samkv_integrations.cli import documents as docs
from samkv_integrations.cli.documents import Question
from samkv_integrations.cli.method_options import configured, configured_eviction
from samkv_integrations.embedding import HashingEmbedding
from samkv_integrations.engine.engine import Engine
from samkv_integrations.errors import EmptyInput, InvalidOption, MissingExtra, SamkvError
from samkv_integrations.eviction import EVICTIONS, Eviction
from samkv_integrations.methods import METHODS, Method
from samkv_integrations.model.loading import load_model
from samkv_integrations.prompt.template import rag_prompt

USER_ERROR, CHECK_FAILED = 2, 1


COMPARED = ("recompute", "reuse", "epic", "samkv-guided", "auto")


SHOWN_QUESTIONS = 3


ALL_METHODS = """\
All methods, the paper's among them: 'samkv bench quality' compares their answers, and
'samkv bench latency' their times in the shape of a larger model."""


class _Commands(typer.core.TyperGroup):
    """Shows an error of ours as one line instead of a traceback."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # noqa: ANN401
        try:
            return super().invoke(ctx)
        except SamkvError as error:
            typer.echo(f"samkv: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(USER_ERROR) from error


app = typer.Typer(
    cls=_Commands,
    help="Answer from documents that a local model has read before.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


store_app = typer.Typer(help="Look into the folder of chunk caches.", no_args_is_help=True)


app.add_typer(store_app, name="store")


app.add_typer(bench_commands.app, name="bench")


ModelName = Annotated[str, typer.Option("--model", help="Hub id, local folder, or 'builtin'.")]


Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]


Dtype = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]


# absolute, because Chroma remembers a folder under the name by which it was opened
Folder = Annotated[
    Path, typer.Option("--dir", resolve_path=True, help="Where collection and caches are kept.")
]


Collection = Annotated[str, typer.Option(help="Name of the Chroma collection.")]


Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


StoreBits = Annotated[
    int, typer.Option(help="Bits of the numbers in caches: 4, 8, or 16 for the model's own.")
]


MethodName = Annotated[str, typer.Option("--method", help="See 'samkv methods'.")]


def main() -> None:
    """Entry point of the console script."""
    app()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"samkv {figures.version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the release.")
    ] = False,
) -> None: ...


@app.command()
def methods(
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option(help="As the README's table.")] = False,
) -> None:
    """List the ways of answering from chunk caches, and of evicting rows while answering."""
    tabled: list[tuple[str, Method | Eviction]] = [
        *(("method", each) for each in METHODS.values()),
        *(("eviction", each) for each in EVICTIONS.values()),
    ]
    rows = [
        {"name": each.name, "kind": kind, "paper": each.paper, "summary": each.summary}
        for kind, each in tabled
    ]
    if as_json:
        _write_json("methods", None, rows)
        return
    cells = [tuple(row.values()) for row in rows]
    columns = ("name", "kind", "paper", "summary")
    if markdown:
        named = [(f"`{name}`", *others) for name, *others in cells]
        typer.echo(markdown_table(columns, named, left=4))
    else:
        tables.console().print(tables.table(columns, cells, left=4))


@app.command()
def doctor(
    model: ModelName = "builtin", device: Device = "auto", dtype: Dtype = "auto",
    folder: Annotated[
        Path | None,
        typer.Option("--dir", resolve_path=True, help="Keep the measured times beside its caches."),
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Check that a model is computed exactly, and measure what suits it. Exit code 1 if it is not.

    It says which --store-bits to take, and when full prefill is faster.
    """
    from samkv_integrations.engine.doctor import examine

    _use_threads_for(model)  # times of another number of threads would not be found again
    loaded = load_model(model, device=device, dtype=dtype)
    checks = list(examine(loaded, None if folder is None else ChunkStore(folder / "kv")))
    failed = [check.name for check in checks if not check.ok]
    if as_json:
        _write_json("doctor", model, [check.to_row() for check in checks])
    else:
        out = tables.console()
        words = [(c.name, "failed" if not c.ok else "warning" if c.is_warning else "ok", c.detail)
                 for c in checks]  # fmt: skip
        out.print(tables.table(("check", "", "detail"), words, left=3))
        verdict = f"FAILED: {', '.join(failed)}" if failed else "can be served exactly"
        out.print(f"\n{model} in {loaded.dtype_name} on {loaded.device}: {verdict}")
    if failed:
        raise typer.Exit(CHECK_FAILED)


@store_app.command()
def stats(folder: Folder = Path(".samkv"), as_json: Json = False) -> None:
    """Show what the chunk caches of a folder take."""
    path = folder / "kv"
    if not path.is_dir():
        raise InvalidOption(f"{path} does not exist; give the --dir that 'samkv ingest' used")
    rows = [asdict(row) for row in ChunkStore(path).stats().rows]
    if as_json:
        _write_json("store stats", None, rows)
        return
    out = tables.console()
    cells = [
        (r["model"], r["dtype"], str(r["store_bits"]), str(r["block_size"]),
         str(r["format_version"]), str(r["chunks"]), figures.size(r["bytes"]))
        for r in rows
    ]  # fmt: skip
    titles = ("model", "dtype", "bits", "block size", "format", "chunks", "bytes")
    out.print(tables.table(titles, cells, left=2))
    out.print(f"\n{sum(r['chunks'] for r in rows)} chunks, "
              f"{figures.size(sum(r['bytes'] for r in rows))} in {path}")  # fmt: skip
    if older := sum(r["chunks"] for r in rows if r["format_version"] < FORMAT_VERSION):
        out.print(f"{older} chunks are of an older format and not used; ingest them again")


@store_app.command()
def sync(
    folder: Folder = Path(".samkv"),
    collections: Annotated[
        list[str] | None, typer.Option("--collection", help="Which; again for more. Default: all.")
    ] = None,
    model: ModelName = "builtin", device: Device = "auto", dtype: Dtype = "auto",
    store_bits: StoreBits = DEFAULT_STORE_BITS,
    grace_s: Annotated[
        float, typer.Option("--grace", help="Keep unused caches that are younger, in seconds.")
    ] = 3600.0,
    prune: Annotated[bool, typer.Option(help="Delete caches that no record uses.")] = True,
    build: Annotated[bool, typer.Option(help="Cache the chunks that are not.")] = True,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Bring caches into line with the records: build what is missing, delete what nothing uses."""
    database = folder / "chroma"
    names = list(dict.fromkeys(collections or ())) or collection_names(database)
    if not names:
        raise EmptyInput(f"{database} holds no collection; ingest documents first")
    opened = [open_collection(database, name, create=False) for name in names]
    engine = _engine(model, folder / "kv", device, dtype, store_bits)
    engine.store.require(engine.fingerprint)
    # What nothing uses belongs to no collection: it is looked for once, when all have been read.
    done = [
        ChromaLink(one, engine).sync(
            build_missing=build, prune=prune and one is opened[-1], grace_s=grace_s, progress=True
        )
        for one in opened
    ]
    rows = [{"collection": name, **asdict(row)} for name, row in zip(names, done, strict=True)]
    if as_json:
        _write_json("store sync", model, rows)
        return
    out = tables.console()
    columns = ("collection", "records", "cached", "linked", "skipped")
    cells = [
        (name, *map(str, (row.n_records, row.n_cached, row.n_linked, row.n_skipped)))
        for name, row in zip(names, done, strict=True)
    ]
    out.print(tables.table(columns, cells))
    if prune:
        last = done[-1]
        out.print(f"\n{last.n_pruned} unused caches deleted ({figures.size(last.bytes_freed)}), "
                  f"{last.n_in_grace} kept for now because they are young")  # fmt: skip


@app.command()
def ingest(
    paths: Annotated[list[Path], typer.Argument(help="Files or folders (.txt, .md).")],
    collection: Collection = "documents", folder: Folder = Path(".samkv"),
    model: ModelName = "builtin", device: Device = "auto", dtype: Dtype = "auto",
    store_bits: StoreBits = DEFAULT_STORE_BITS,
    chunk_size: Annotated[int, typer.Option(help="Longest chunk, in the model's tokens.")] = 512,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Read documents once, and keep what the model made of them."""
    files = docs.find_documents(paths, leave_out=folder)
    engine = _engine(model, folder / "kv", device, dtype, store_bits)
    pieces = docs.read_pieces(files, engine.model, chunk_size)
    opened = open_collection(folder / "chroma", collection, create=True)
    texts = [piece.text for piece in pieces]
    link = ChromaLink(opened, engine)
    done = link.add(
        [piece.id for piece in pieces],
        texts,
        HashingEmbedding().embed(texts),
        [{"source": piece.source} for piece in pieces],
        progress=True,
    )
    _drop_outdated(link, pieces)
    row = {"collection": collection, "files": len(files), **asdict(done)}
    if as_json:
        _write_json("ingest", model, [row])
    else:
        out = tables.console()
        out.print(f"{len(files)} files, {done.n_records} chunks in collection {collection!r}: "
                  f"{done.n_cached} prefilled, {done.n_hit} already cached")  # fmt: skip
        out.print(f"{figures.seconds(done.seconds)}, {figures.size(done.bytes_on_disk)} added")


def _drop_outdated(link: ChromaLink, pieces: Sequence[docs.Piece]) -> None:
    """Remove the records, and caches, of chunks that the ingested files no longer have."""
    sources = list({piece.source for piece in pieces})
    where: Any = {"source": {"$in": sources}}
    held = link.collection.get(where=where, include=[])["ids"]
    if outdated := sorted(set(held) - {piece.id for piece in pieces}):
        link.delete(ids=outdated)


@app.command()
def ask(
    question: Annotated[str | None, typer.Argument(help="What to ask.")] = None,
    questions: Annotated[
        Path | None, typer.Option(help="JSON Lines file of many (question, answers).")
    ] = None,
    collection: Collection = "documents", folder: Folder = Path(".samkv"),
    model: ModelName = "builtin", device: Device = "auto", dtype: Dtype = "auto",
    store_bits: StoreBits = DEFAULT_STORE_BITS,
    top_k: Annotated[int, typer.Option(help="Chunks to retrieve.")] = 4,
    method: MethodName = "auto",
    compare: Annotated[str, typer.Option(help="Methods to run side by side: NAME,NAME,...")] = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="An option of the method, NAME=VALUE.")
    ] = None,
    eviction: Annotated[
        str | None,
        typer.Option(
            help="Rows to evict while answering, see 'samkv methods'; or none. "
            "Default: the method's own."
        ),
    ] = None,
    eviction_budget: Annotated[
        float | None, typer.Option(help="Rows to go on with, as a share of the prompt.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 64,
    chat: Annotated[bool, typer.Option(help="Use the model's chat template.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Answer from the ingested chunks."""
    if (question is None) == (questions is None):
        raise InvalidOption("give either a question or --questions FILE")
    asked = docs.read_questions(questions) if questions else [Question(question=question or "")]
    methods = configured([name.strip() for name in (compare or method).split(",")], settings or [])
    rule = configured_eviction(eviction, eviction_budget)
    opened = open_collection(folder / "chroma", collection, create=False)
    engine = _engine(model, folder / "kv", device, dtype, store_bits)
    engine.store.require(engine.fingerprint)
    link, embedding = ChromaLink(opened, engine), HashingEmbedding()
    rows: list[dict[str, Any]] = []
    sources, texts = [""], [""]
    for one in tqdm(asked, desc="asking", disable=questions is None):
        found = link.query(embedding.embed([one.question])[0], top_k)
        sources = [str(record.metadata.get("source", record.id)) for record in found]
        texts = [record.text for record in found]
        prompt = rag_prompt(one.question, texts, chat=chat)
        if not rows and len(methods) > 1:  # the first pass of a process is slower than all others
            engine.generate(prompt, texts, method=methods[0], max_new_tokens=1)
            engine.prefixes.clear()  # or `auto` would go on from there
        answers = []
        for each in methods:
            answer = engine.generate(
                prompt, texts, method=each, eviction=rule, max_new_tokens=max_new_tokens
            )
            answers.append(tables.answer_row(one, answer.text, sources, answer.report))
        rows += tables.with_ratios(answers)
    if as_json:
        _write_json("ask", model, rows)
        return
    out = tables.console()
    if questions:
        out.print(tables.summary_table(rows))
    elif len(methods) > 1:
        out.print(tables.comparison_table(rows))
    else:
        out.print(rows[0]["answer"])
    if not questions:
        out.print(tables.sources_table(sources, texts))
    if len(rows) == 1:
        out.print("\n".join(tables.report_lines(rows[0])))


@app.command()
def quickstart(
    documents: Annotated[
        Path, typer.Option(help="Folder of sample documents.")
    ] = Path("examples/town_archive"),
    questions: Annotated[
        Path | None, typer.Option(help="Their questions; questions.jsonl in that folder.")
    ] = None,
    folder: Folder = Path(".samkv/quickstart"),
    as_json: Json = False,
) -> None:  # fmt: skip
    """The whole way on the built-in model: index, ask through LlamaIndex, compare the methods."""
    if not documents.is_dir():
        raise InvalidOption(
            f"{documents} is not a folder; run this where the sample documents are (a checkout of "
            "the repository), or name a folder with --documents"
        )
    files = docs.find_documents([documents])
    asked = docs.read_questions(questions or documents / "questions.jsonl")
    _use_threads_for("builtin")
    run = _quickstart_of_llama_index()(folder)
    out = tables.console(stderr=as_json)
    done = run.ingest(files)
    out.print(f"{len(files)} documents, {done.n_records} chunks in Chroma: {done.n_cached} "
              f"prefilled now, {done.n_hit} already cached ({figures.seconds(done.seconds)}, "
              f"{figures.size(done.bytes_on_disk)} written to {folder / 'kv'})")  # fmt: skip
    run.ask(asked[0].question, COMPARED[0])  # the first pass of a process is slower than all others
    rows: list[dict[str, Any]] = []
    shown: list[str] = []
    for one in tqdm(asked, desc="asking"):
        replies = {name: run.ask(one.question, name) for name in COMPARED}
        answers = [
            tables.answer_row(one, reply.text, reply.sources, reply.report)
            for reply in replies.values()
        ]
        rows += tables.with_ratios(answers)
        best = replies["auto"]
        names = ", ".join(best.sources[:3])
        shown += ["", one.question, f"  {best.text.strip()}", f"  from {names}, ..."]
    out.print("\n".join(shown[: 4 * SHOWN_QUESTIONS]))
    if as_json:
        _write_json("quickstart", "builtin", rows)
    else:
        n_tokens = round(mean(row["prompt_tokens"] for row in rows))
        out.print(f"\n{len(asked)} questions, prompts of {n_tokens} tokens:\n")
        out.print(tables.summary_table(rows))
        ran = Counter(row["ran"] for row in rows if row["method"] == "auto").most_common()
        ways = ", ".join(f"{way} for {n} questions" for way, n in ran)
        out.print(f"\nauto, the default, ran {ways}.\n{ALL_METHODS}")


def _quickstart_of_llama_index() -> Any:  # noqa: ANN401
    """The class of the connector, which alone may import LlamaIndex."""
    try:
        return importlib.import_module("llama_index.llms.samkv.quickstart").Quickstart
    except ModuleNotFoundError as error:
        raise MissingExtra.of(error.name or "llama_index", "llama-index") from error


def _engine(model: str, store: Path, device: str, dtype: str, store_bits: int) -> Engine:
    _use_threads_for(model)
    check_store_bits(store_bits)  # before a folder is made
    return Engine.from_pretrained(
        model, ChunkStore(store), device=device, dtype=dtype, store_bits=store_bits
    )


def _use_threads_for(model: str) -> None:
    """The built-in model is so small that a second thread costs more than it gives."""
    if model == "builtin":
        torch.set_num_threads(1)


def _write_json(command: str, model: str | None, rows: Iterable[figures.Row]) -> None:
    typer.echo(figures.to_json(command, model, rows))
