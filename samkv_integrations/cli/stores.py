"""What the commands of ``samkv store`` share: the store, the caches that are meant, and a bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tqdm.auto import tqdm

from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.cache.index import EVICTED, LOST, PRESENT
from samkv_integrations.chroma.database import Database
from samkv_integrations.chroma.records import Records
from samkv_integrations.errors import InvalidOption


def store_in(
    folder: Path, namespace: str = "", remote: str | None = None, *, is_new: bool = True
) -> ChunkStore:
    """The store that ``samkv ingest --dir`` has made.

    is_new: whether it may be a new one, if there is a remote tier.

    Raises InvalidOption if there is none.
    """
    path = folder / "kv"
    if not path.is_dir() and not (remote and is_new):
        if (folder / "store.json").is_file():
            raise InvalidOption(
                f"{folder} is itself a folder of caches; give --dir the folder that holds it under "
                "the name 'kv'"
            )
        raise InvalidOption(f"{path} does not exist; give the --dir that 'samkv ingest' used")
    return ChunkStore(path, namespace=namespace, remote=remote)


def keys_of(database: Database, collections: Sequence[str] | None) -> set[str] | None:
    """The keys that the records of these collections name; None for no collection, which is all."""
    if not collections:
        return None
    keys: set[str] = set()
    for name in collections:
        keys |= Records(database.collection(name)).keys()
    return keys


def require_own_records(store: ChunkStore, database: Database, names: Sequence[str]) -> None:
    """See that no collection is another namespace's, whose texts would be cached in the store's.

    It is if its records name caches of another namespace only. Raises InvalidOption.
    """
    places = store.index.places(None, PRESENT, EVICTED, LOST)
    own = {key for _, key, namespace in places if namespace == store.namespace}
    others = {key: namespace for _, key, namespace in places if namespace != store.namespace}
    for name in names if others else ():
        keys = Records(database.collection(name)).keys()
        found = sorted({others[key] for key in keys & others.keys()})
        if found and not keys & own:
            raise InvalidOption(
                f"the records of collection {name!r} have their caches in namespace {found[0]!r}, "
                f"not in {store.namespace!r}; give --namespace, and --collection for each that is "
                "of that namespace"
            )


@contextmanager
def progress_bar(desc: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, and what to call with how much is done, and of how much."""
    with tqdm(desc=desc, unit="chunk") as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
