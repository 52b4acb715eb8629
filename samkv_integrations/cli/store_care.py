"""``samkv store gc``, ``verify``, ``budget`` and ``warm``: no model is loaded."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from samkv_integrations import figures
from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.cache.upkeep import VerifyResult
from samkv_integrations.cache.upkeep import gc as collect_garbage
from samkv_integrations.cache.upkeep import pull as pull_caches
from samkv_integrations.cache.upkeep import verify as verify_caches
from samkv_integrations.cache.upkeep import warm as warm_caches
from samkv_integrations.chroma.database import Database
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli.sizes import bytes_of
from samkv_integrations.cli.stores import keys_of, progress_bar, store_in
from samkv_integrations.figures import Row, size

DAMAGE_LEFT = 1
"""Exit code if damaged caches are where they were."""

SHOWN_DAMAGE = 20
NO_LIMIT = "none"


def gc(folder: args.Folder = Path(".samkv"), as_json: args.Json = False) -> None:
    """Delete what nobody will use: what killed processes left, damaged files, lost texts.

    Of all namespaces. Caches of deleted records are deleted by 'samkv store sync'.
    """
    done = collect_garbage(store_in(folder))
    if as_json:
        tables.write_json("store gc", None, [asdict(done)])
        return
    found = done.recovered
    tables.console().print(
        f"{found.n_unfinished} unfinished files, {found.n_damaged} damaged ones and "
        f"{done.n_forgotten} texts whose cache had gone deleted, {size(done.bytes_freed)} in all\n"
        f"{found.n_adopted} caches found that the index did not know, {found.n_lost} missed"
    )


def verify(
    folder: args.Folder = Path(".samkv"), repair: args.Repair = False, as_json: args.Json = False
) -> None:
    """Read every cache of every namespace, and check all its bytes. Exit code 1 if one is damaged.

    With --repair damaged ones are deleted, and computed again when they are asked for.
    """
    with progress_bar("verifying") as show:
        found = verify_caches(store_in(folder), repair=repair, progress=show)
    if as_json:
        tables.write_json("store verify", None, [asdict(found)])
    else:
        out = tables.console()
        for damage in found.damaged[:SHOWN_DAMAGE]:
            out.print(f"{damage.key}: {damage.detail}", soft_wrap=True)
        if len(found.damaged) > SHOWN_DAMAGE:
            out.print(f"and {len(found.damaged) - SHOWN_DAMAGE} more; --json names each")
        out.print(f"{found.n_chunks} chunks, {size(found.n_bytes)} read: {len(found.damaged)} "
                  f"damaged, {found.n_repaired} of them deleted")  # fmt: skip
        if found.damaged:
            out.print(_next_step(found, repair=repair))
    if len(found.damaged) > found.n_repaired:
        raise typer.Exit(DAMAGE_LEFT)


def _next_step(found: VerifyResult, *, repair: bool) -> str:
    if not repair:
        return "'samkv store verify --repair' deletes damaged ones"
    if found.n_repaired < len(found.damaged):
        return "what could not be read stays; look at its permissions, and at the disk"
    return "they are computed again when they are asked for; 'samkv store sync' does all at once"


def budget(
    max_bytes: args.Budget = None, namespace: args.BudgetNamespace = None,
    folder: args.Folder = Path(".samkv"), as_json: args.Json = False,
) -> None:  # fmt: skip
    """Show or set what caches may take on disk, for every process and until it is set again.

    What was used longest ago makes room, and is computed again when it is asked for.
    """
    store = store_in(folder)
    n_before = store.stats(everyone=True).n_chunks
    if max_bytes is not None:
        limit = None if max_bytes == NO_LIMIT else bytes_of("--max-bytes", max_bytes)
        most, quota = store.index.budget()
        if namespace is None:
            store.set_budget(limit, quota)
        else:
            others = {name: value for name, value in quota.items() if name != namespace}
            store.set_budget(most, others if limit is None else {**others, namespace: limit})
    rows = _budget_rows(store)
    if as_json:
        tables.write_json("store budget", None, rows)
        return
    cells = [(_whose(row), size(row["bytes"]), _limit(row["max_bytes"])) for row in rows]
    out = tables.console()
    out.print(tables.table(("namespace", "bytes", "limit"), cells))
    if max_bytes is not None and (n_gone := n_before - store.stats(everyone=True).n_chunks) > 0:
        out.print(f"{n_gone} caches had to make room, and will be computed when they are asked for")


def _budget_rows(store: ChunkStore) -> list[Row]:
    """Bytes and limit of all namespaces together (None), and of each that has either."""
    most, quota = store.index.budget()
    found = store.stats(everyone=True)
    taken = dict.fromkeys(sorted(quota), 0)
    for row in found.rows:
        taken[row.namespace] = taken.get(row.namespace, 0) + row.bytes
    rows: list[Row] = [{"namespace": None, "bytes": found.bytes, "max_bytes": most}]
    return rows + [
        {"namespace": name, "bytes": n_bytes, "max_bytes": quota.get(name)}
        for name, n_bytes in taken.items()
    ]


def _whose(row: Row) -> str:
    return "all" if row["namespace"] is None else repr(row["namespace"])


def _limit(n_bytes: int | None) -> str:
    return NO_LIMIT if n_bytes is None else figures.size(n_bytes)


def warm(
    folder: args.Folder = Path(".samkv"), remote: args.Remote = None,
    collections: args.Collections = None, chroma: args.ChromaServer = None,
    max_bytes: args.WarmBytes = None,
    namespace: args.Namespace = "", as_json: args.Json = False,
) -> None:  # fmt: skip
    """Read caches ahead, those used last first, so that the first questions find them in memory.

    With --remote what the folder lacks is then fetched, as by 'samkv store pull'.
    """
    limit = None if max_bytes is None else bytes_of("--bytes", max_bytes)
    store = store_in(folder, namespace, remote)
    keys = keys_of(Database(folder / "chroma", chroma), collections)
    with progress_bar("warming") as show:
        done = warm_caches(store, keys, max_bytes=limit, progress=show)
    row = asdict(done)
    if remote:
        room = None if limit is None else limit - done.bytes_read
        with progress_bar("fetching") as show:
            fetched = pull_caches(store, keys, max_bytes=room, progress=show)
        row |= {"n_fetched": fetched.n_chunks, "bytes_fetched": fetched.n_bytes,
                "n_left": done.n_left + fetched.n_left}  # fmt: skip
    if as_json:
        tables.write_json("store warm", None, [row])
        return
    came = f", {row['n_fetched']} fetched, {size(row['bytes_fetched'])}" if remote else ""
    left = f", {row['n_left']} left" if row["n_left"] else ""
    tables.console().print(f"{done.n_chunks} caches, {size(done.bytes_read)} read{came}{left}")
