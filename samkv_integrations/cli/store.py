"""``samkv store``: inspect and maintain the folder of chunk caches."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli.formatting import Row, count, size
from samkv_integrations.cli.loading import CacheFolder, Caches, Index
from samkv_integrations.errors import EmptyInput
from samkv_integrations.option import bytes_of

DAMAGE_LEFT = SOME_LEFT = 1
"""Exit code if damaged caches remain, or if caches could not be copied."""

STATS = (
    "namespace", "model", "dtype", "store_bits", "block_size", "prefix", "chunks", "bytes",
    "hit_rate", "evicted", "corrupt",
)  # fmt: skip
SYNCED = ("collection", "n_records", "n_cached", "n_linked", "n_pruned", "bytes_freed", "n_evicted")
"""Columns of tables; --json has more."""

SHOWN_DAMAGE = 20
NO_LIMIT = "none"


@dataclass(frozen=True, kw_only=True)
class Synced:
    """The options of `sync`."""

    collections: Annotated[
        list[str] | None,
        typer.Option("--collection", help="A collection; repeat for more. Default: all."),
    ] = None
    grace_s: Annotated[
        float, typer.Option("--grace", help="Keep unused caches younger than this many seconds.")
    ] = 3600.0


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The options of `budget`."""

    max_bytes: Annotated[
        str | None, typer.Option(help="A size such as 20GB, or none. Default: show the limit.")
    ] = None
    namespace: Annotated[str | None, typer.Option(help="Limit this namespace only.")] = None


@dataclass(frozen=True, kw_only=True)
class Forgotten:
    """The options of `forget`."""

    files: Annotated[
        list[Path] | None,
        typer.Argument(exists=True, help="Documents whose cached chunks are deleted."),
    ] = None
    texts: Annotated[
        list[str] | None, typer.Option("--text", help="The text of a chunk; repeat for more.")
    ] = None


def stats(where: CacheFolder, as_json: args.Json = False) -> None:
    """Show the size and the use of the chunk caches, by model and namespace."""
    store = where.store()
    found = store.stats(everyone=True)
    rows = [{**asdict(row), "hit_rate": row.hit_rate} for row in found.rows]
    shown = [{**row, "prefix": _prefix(row["prefix"])} for row in rows]
    limit = "" if found.max_bytes is None else f" of {size(found.max_bytes)}"
    said = f"{count(found.n_chunks, 'chunk')}, {size(found.bytes)}{limit} in {store.path}"
    tables.report("store stats", None, rows, tables.rows_table(shown, STATS), said, as_json=as_json)


def _prefix(named: str) -> str:
    """`FingerprintStats.prefix` in short: the number of its tokens."""
    return str(len(named.split(",")) if named else 0)


def sync(index: Index, what: Synced, as_json: args.Json = False) -> None:
    """Bring caches into line with the records: build missing ones, delete unused ones.

    Evicted caches are built again if there is room. With --model, caches of that model are built.
    """
    names = list(dict.fromkeys(what.collections or ())) or index.database.names()
    if not names:
        raise EmptyInput(f"{index.database} holds no collection; ingest documents first")
    # without --model a wrong one would compute everything again
    links = index.links(names, must_have_caches=index.model is None)
    # unused caches belong to no collection: prune once, after the last one
    done = [
        link.sync(prune=link is links[-1], grace_s=what.grace_s, progress=True) for link in links
    ]
    rows = [{"collection": name, **asdict(row)} for name, row in zip(names, done, strict=True)]
    model = links[0].engine.model.name
    tables.report("store sync", model, rows, tables.rows_table(rows, SYNCED), as_json=as_json)


def forget(
    given: Forgotten, caches: Caches, converting: args.Converting, as_json: args.Json = False
) -> None:
    """Delete the caches and texts of documents, for all models. Loads no model.

    Records stay, so delete them first ('samkv remove'), or their texts are cached again. Give the
    options with which the files were ingested.
    """
    from samkv_integrations.ingest.documents import UTF_8
    from samkv_integrations.ingest.reader import DocumentReader
    from samkv_integrations.store.chunk import normalise

    with DocumentReader.opened(converting.limits, converting.encoding) as reader:
        read = [reader.read(file, follows_links=True) for file in given.files or ()]
    documents = [each.text for each in read]
    bodies = {normalise(text) for text in given.texts or ()} - {""}
    if not documents and not bodies:
        raise EmptyInput("nothing to forget; name the files of documents, or give --text")
    store = caches.store()
    n_chunks = store.forget(
        lambda body: body in bodies or bool(body) and any(body in text for text in documents)
    )
    said = (
        f"{count(n_chunks, 'chunk')} deleted from {store.path}; records of a vector store stay"
        if n_chunks
        else f"no chunk is deleted: no cached chunk in {store.path} has such a text (namespace "
        f"{caches.namespace!r})"
    )
    if guessed := sorted({each.encoding for each in read} - {UTF_8}):
        said += f"; files were read as {', '.join(guessed)}, --encoding names another encoding"
    tables.report("store forget", None, [{"n_chunks": n_chunks}], said, as_json=as_json)


def gc(where: CacheFolder, as_json: args.Json = False) -> None:
    """Delete unusable files of all namespaces: unfinished ones, damaged ones, texts without cache.

    'samkv store sync' deletes the caches of deleted records.
    """
    from samkv_integrations.store.upkeep import gc as collect_garbage

    done = collect_garbage(where.store())
    flat = asdict(done.recovered) | {n: v for n, v in vars(done).items() if n != "recovered"}
    tables.report("store gc", None, [asdict(done)], tables.rows_table([flat]), as_json=as_json)


def verify(
    where: CacheFolder,
    repair: Annotated[bool, typer.Option("--repair", help="Delete damaged caches.")] = False,
    as_json: args.Json = False,
) -> None:
    """Verify all bytes of every cache of every namespace. Exit code 1 if one is damaged.

    --repair deletes damaged caches; they are computed again when a prompt needs them.
    """
    from samkv_integrations.store.upkeep import verify as verify_caches

    found = verify_caches(where.store(), repair=repair, progress=True)
    n_damaged = len(found.damaged)
    row = {"n_chunks": found.n_chunks, "n_bytes": found.n_bytes, "n_damaged": n_damaged,
           "n_repaired": found.n_repaired}  # fmt: skip
    lines = [f"{damage.key}: {damage.detail}" for damage in found.damaged[:SHOWN_DAMAGE]]
    if n_damaged > SHOWN_DAMAGE:
        lines.append(f"and {n_damaged - SHOWN_DAMAGE} more; --json names each")
    if n_damaged and not repair:
        lines.append("'samkv store verify --repair' deletes damaged caches")
    elif n_damaged > found.n_repaired:
        lines.append("a cache that cannot be read stays; check its permissions, and the disk")
    elif n_damaged:
        lines.append("a prompt that needs one computes it again; 'samkv store sync' computes all")
    tables.report(
        "store verify", None, [asdict(found)], tables.rows_table([row]), *lines, as_json=as_json
    )
    if n_damaged > found.n_repaired:
        raise typer.Exit(DAMAGE_LEFT)


def budget(limit: Limit, where: CacheFolder, as_json: args.Json = False) -> None:
    """Show or set the most bytes of caches on disk, for every process.

    The least recently used caches are evicted, and computed again when a prompt needs them.
    """
    is_none = limit.max_bytes in (None, NO_LIMIT)
    n_bytes = None if is_none else bytes_of("max_bytes", str(limit.max_bytes))
    store = where.store()
    n_before = store.stats(everyone=True).n_chunks
    if limit.max_bytes is not None:
        most, quota = store.index.budget()
        if limit.namespace is None:
            most = n_bytes
        else:
            quota = {name: value for name, value in quota.items() if name != limit.namespace}
            quota |= {} if n_bytes is None else {limit.namespace: n_bytes}
        store.set_budget(most, quota)
    # a row for all namespaces together (None), and for each one with caches or a limit
    most, quota = store.index.budget()
    stats = store.stats(everyone=True)
    taken = dict.fromkeys(sorted(quota), 0)
    for one in stats.rows:
        taken[one.namespace] = taken.get(one.namespace, 0) + one.bytes
    rows: list[Row] = [{"namespace": None, "bytes": stats.bytes, "max_bytes": most}]
    rows += [
        {"namespace": name, "bytes": n_bytes, "max_bytes": quota.get(name)}
        for name, n_bytes in taken.items()
    ]
    table = tables.rows_table([{**rows[0], "namespace": "all"}, *rows[1:]])
    evicted = n_before - stats.n_chunks
    said = [f"{count(evicted, 'cache')} evicted"] if evicted > 0 else []
    tables.report("store budget", None, rows, table, *said, as_json=as_json)


def push(caches: Caches, as_json: args.Json = False) -> None:
    """Copy local caches to the remote tier. Exit code 1 if some cannot be copied.

    'samkv ingest --remote' copies at once. This command is for caches that were made without a
    remote tier, or while the tier was not available.
    """
    from samkv_integrations.store.upkeep import push as push_caches

    store = caches.store(is_new=False)
    done = push_caches(store, progress=True)
    tables.report("store push", None, [asdict(done)], as_json=as_json)
    if done.n_left:
        raise typer.Exit(SOME_LEFT)


def pull(
    caches: Caches,
    max_bytes: Annotated[
        str | None, typer.Option("--bytes", help="Most bytes to fetch, such as 4GB.")
    ] = None,
    as_json: args.Json = False,
) -> None:
    """Fetch caches of other machines, newest first, before questions need them."""
    limit = None if max_bytes is None else bytes_of("max_bytes", max_bytes)

    from samkv_integrations.store.upkeep import pull as pull_caches

    store = caches.store()
    done = pull_caches(store, max_bytes=limit, progress=True)
    tables.report("store pull", None, [asdict(done)], as_json=as_json)


app = typer.Typer(
    help="Inspect and maintain the folder of chunk caches.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for each in (stats, sync, forget, gc, verify, budget, push, pull):
    app.command(cls=args.Command)(args.with_flags(each))
