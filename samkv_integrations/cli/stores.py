"""What the commands of ``samkv store`` share: the store, the caches that are meant, and a bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tqdm.auto import tqdm

from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.chroma.client import open_collection
from samkv_integrations.chroma.records import Records
from samkv_integrations.errors import InvalidOption


def store_in(folder: Path, namespace: str = "") -> ChunkStore:
    """The store that ``samkv ingest --dir`` has made. Raises InvalidOption if there is none."""
    path = folder / "kv"
    if not path.is_dir():
        raise InvalidOption(f"{path} does not exist; give the --dir that 'samkv ingest' used")
    return ChunkStore(path, namespace=namespace)


def keys_of(folder: Path, collections: Sequence[str] | None) -> set[str] | None:
    """The keys that the records of these collections name; None for no collection, which is all."""
    if not collections:
        return None
    keys: set[str] = set()
    for name in collections:
        keys |= Records(open_collection(folder / "chroma", name, create=False)).keys()
    return keys


@contextmanager
def progress_bar(desc: str, unit: str = "chunk") -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, and what to call with how much is done, and of how much."""
    with tqdm(desc=desc, unit=unit, unit_scale=unit == "B") as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
