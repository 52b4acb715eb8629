"""How commands find collections, load engines and open stores, and parse sizes and methods."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from samkv_integrations.cli import arguments as args
from samkv_integrations.engine.options import EngineOptions, OwnEngineOptions, check_options
from samkv_integrations.errors import InvalidOption, UnknownOption

if TYPE_CHECKING:
    from samkv_integrations.cache.disk import ChunkStore
    from samkv_integrations.cache.store import Store
    from samkv_integrations.chroma.client import Database
    from samkv_integrations.chroma.link import ChromaLink
    from samkv_integrations.engine.engine import Engine
    from samkv_integrations.eviction import Eviction
    from samkv_integrations.methods import Method

BUILTIN = "builtin"

_UNITS = {"": 1} | {
    f"{prefix}{kind}": base**power
    for power, prefix in enumerate(("", "k", "m", "g", "t"))
    for kind, base in (("b", 1000), ("ib", 1024))
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)")


def bytes_of(option: str, text: str) -> int:
    """The bytes of a size such as ``500MB``, ``1.5 GiB`` or ``4096``.

    Raises InvalidOption, which names ``option``, for any other text, or an impossible size.
    """
    from samkv_integrations.cache.index.index import MOST

    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None or not 1 <= (size := float(found[1]) * unit) < MOST:
        raise InvalidOption(f"{option} {text}; give a number of bytes, or a size such as 20GB")
    return int(size)


def words(text: str) -> list[str]:
    """The parts between commas, without empty ones."""
    return [part.strip() for part in text.split(",") if part.strip()]


def given_methods(names: Sequence[str], settings: Sequence[str]) -> list[Method]:
    """The methods called ``names``, with ``settings`` in those that have such an option.

    Settings without a name are of the default method. Without both the list is empty, and the
    engine chooses.

    Raises:
        UnknownOption: a method does not exist, or none of them has such an option.
        InvalidOption: a value has the wrong type, or is out of range.
    """
    from samkv_integrations.methods import DEFAULT_METHOD, get_method
    from samkv_integrations.methods.base import option_names, with_option

    if settings and not names:
        names = [DEFAULT_METHOD]
    methods = [get_method(name) for name in names]
    for setting in settings:
        name = setting.partition("=")[0]
        known = {option for method in methods for option in option_names(method)}
        if name not in known:
            raise UnknownOption.among(f"option of {', '.join(names)}", name, known or {"none"})
        methods = [
            with_option(method, setting) if name in option_names(method) else method
            for method in methods
        ]
    return methods


def eviction_of(name: str | None, budget_ratio: float | None = None) -> Eviction | str | None:
    """The eviction called ``name``, with ``budget_ratio`` if given; None and "none" as they are.

    Raises:
        UnknownOption: the eviction does not exist.
        InvalidOption: the budget is out of range, or there is no eviction.
    """
    from samkv_integrations.eviction import get_eviction, with_budget

    rule = get_eviction(name)
    if budget_ratio is None:
        return rule or name
    if rule is None:
        raise InvalidOption(
            f"an eviction budget of {budget_ratio} without an eviction; name one, or leave the "
            "budget out"
        )
    return with_budget(rule, budget_ratio)


def use_threads_for(model: str) -> None:
    """Use one thread for the built-in model, which is too small for a second one to help."""
    if model == BUILTIN:
        import torch

        torch.set_num_threads(1)


def engine_of(
    model: str, store: Path, device: str = "auto", dtype: str = "auto",
    store_bits: int | None = None, max_bytes: int | None = None, namespace: str = "",
    remote: str | None = None,
    **options: Any,  # noqa: ANN401  (of `Engine`, which refuses others)
) -> Engine:  # fmt: skip
    """An engine over the chunk caches in the folder ``store``, which is created if necessary.

    max_bytes: most bytes of the caches from now on; None for the limit that was set before.
    remote: where machines share them. options: other options of an `Engine`.
    """
    from samkv_integrations.cache.disk import ChunkStore
    from samkv_integrations.engine.engine import Engine

    options["store_bits"] = store_bits
    check_options(EngineOptions, options)  # before a folder is made
    use_threads_for(model)
    opened = ChunkStore(store, namespace=namespace, max_bytes=max_bytes, remote=remote)
    return Engine.from_pretrained(model, opened, device=device, dtype=dtype, **options)


@dataclass(frozen=True, kw_only=True)
class Ingested:
    """The settings of an ingest. path: absolute path of a model in a folder, else ""."""

    model: str = BUILTIN
    dtype: str = "auto"
    store_bits: int | None = None
    path: str = ""

    @property
    def here(self) -> str:
        """The model's name; its path if the name, a relative path, leads elsewhere now."""
        return self.model if self.path in ("", str(Path(self.model).resolve())) else self.path


@dataclass(frozen=True, kw_only=True)
class Index:
    """The options that say where documents are ingested, and by which model.

    model, dtype, store_bits: None for those of the ingest.
    """

    folder: args.Folder = Path(".samkv")
    chroma: args.ChromaServer = None
    model: args.SameModel = None
    device: args.Device = "auto"
    dtype: args.SameDtype = None
    store_bits: args.SameBits = None
    namespace: args.Namespace = ""
    remote: args.Remote = None

    @property
    def database(self) -> Database:
        """The Chroma database. Raises InvalidOption if it cannot be opened."""
        from samkv_integrations.chroma.client import Database

        return Database(self.folder / "chroma", self.chroma)

    def as_ingested(self, places: Sequence[tuple[str, str]]) -> Ingested:
        """The given settings, else those of the collections' ingest, else the defaults.

        places: namespace and name of each collection; empty for all known ones. A new collection
        takes the settings of the others in the folder.

        Raises InvalidOption if they were ingested with several models, and none is given.
        """
        known = _remembered(self.folder / "kv")
        keys = map(_key, places)
        found = [known[key] for key in keys if key in known] or [*known.values()]
        models = {one.path or one.model: one.here for one in found}
        if self.model is None and len(models) > 1:
            raise InvalidOption(
                f"the collections were ingested with {' and '.join(models.values())}; give one "
                f"with --model{'' if places else ', and --collection for each that is of it'}"
            )
        given = _path(self.model or "")
        same = [
            one for one in found if self.model in (None, one.model) or (given and one.path == given)
        ]
        last = same[-1] if same else Ingested(model=self.model or BUILTIN)
        return Ingested(
            model=self.model or last.here, dtype=self.dtype or last.dtype,
            store_bits=last.store_bits if self.store_bits is None else self.store_bits,
        )  # fmt: skip

    def engine(
        self, given: Ingested, max_bytes: int | None = None, **options: Unpack[OwnEngineOptions]
    ) -> Engine:
        """An engine over the chunk caches. given: of `as_ingested`. options: see `Engine`."""
        return engine_of(
            given.model, kv_in(self.folder), self.device, given.dtype, given.store_bits, max_bytes,
            self.namespace, self.remote, **options,
        )  # fmt: skip

    def links(self, names: Sequence[str], **options: Unpack[OwnEngineOptions]) -> list[ChromaLink]:
        """The collections, linked to one engine. options: see `Engine`.

        Raises InvalidOption if a collection does not exist or belongs to another namespace, or if
        its caches are another model's.
        """
        from samkv_integrations.chroma.link import ChromaLink

        database = self.database
        opened = [database.collection(name) for name in names]
        if (self.folder / "kv").is_dir():
            require_own_records(store_in(self.folder, self.namespace), database, names)
        engine = self.engine(
            self.as_ingested([(self.namespace, name) for name in names]), **options
        )
        engine.store.require(engine.fingerprint)
        return [ChromaLink(one, engine) for one in opened]


_NOTE = "ingested"


def require_same(
    folder: Path, database: Database, place: tuple[str, str], now: Ingested, dtype: str | None,
    files: Sequence[Path],
) -> None:  # fmt: skip
    """Raises InvalidOption if a collection holds other documents, of another model or dtype.

    now: the settings for ``files``. dtype: the given one, if any.
    """
    before, path = _remembered(folder / "kv").get(_key(place), now), _path(now.model)
    if now.model not in (before.model, before.here) and not (path and path == before.path):
        what = f"model {before.model}"
    elif dtype not in (None, "auto", before.dtype):
        what = f"dtype {before.dtype}"
    else:
        return
    collection, sources = database.collection(place[1], create=True), list(map(str, files))
    others: Any = {"source": {"$nin": sources}}
    if collection.get(where=others, limit=1, include=[])["ids"]:
        raise InvalidOption(
            f"collection {place[1]!r} holds other documents, ingested with {what}, and is asked "
            "with one model and dtype; leave the option out, give another --collection, or ingest "
            "all of its documents"
        )


def remember(folder: Path, store: Store, place: tuple[str, str], ingested: Ingested) -> None:
    """Store the settings of a collection's ingest beside the caches."""
    known = _remembered(folder / "kv")
    known[_key(place)] = replace(ingested, path=_path(ingested.model))
    store.put_note(_NOTE, json.dumps({key: asdict(one) for key, one in known.items()}))


def _remembered(kv: Path) -> dict[str, Ingested]:
    from samkv_integrations.cache.files.folder import read_small

    # a damaged note counts as missing
    with suppress(OSError, ValueError, TypeError, LookupError, AttributeError):
        found = json.loads(read_small(kv / f"{_NOTE}.json"))
        return {
            key: Ingested(
                model=str(one["model"]), dtype=str(one["dtype"]),
                store_bits=int(one["store_bits"]), path=str(one["path"]),
            )
            for key, one in found.items()
        }  # fmt: skip
    return {}


def _path(model: str) -> str:
    """The absolute path of a model in a folder; "" for other names."""
    is_name = model in ("", BUILTIN, "smollm2") or not Path(model).exists()
    return "" if is_name else str(Path(model).resolve())


def _key(place: tuple[str, str]) -> str:
    return json.dumps(place)


def kv_in(folder: Path) -> Path:
    """The folder of the caches in that of ``--dir``, which may be it itself."""
    path = folder / "kv"
    return folder if not path.is_dir() and (folder / "store.json").is_file() else path


def store_in(
    folder: Path, namespace: str = "", remote: str | None = None, *, is_new: bool = True
) -> ChunkStore:
    """The store of ``samkv ingest --dir``; ``folder`` may also be that of the caches.

    is_new: whether to create it if there is a remote tier.

    Raises InvalidOption if it does not exist.
    """
    from samkv_integrations.cache.disk import ChunkStore

    path = kv_in(folder)
    if not path.is_dir() and not (remote and is_new):
        raise InvalidOption(f"{path} does not exist; give the --dir that 'samkv ingest' used")
    return ChunkStore(path, namespace=namespace, remote=remote)


def require_own_records(store: ChunkStore, database: Database, names: Sequence[str]) -> None:
    """Raises InvalidOption if all records of a collection have their caches in another namespace.

    Its texts would be cached in this one otherwise.
    """
    from samkv_integrations.cache.index.index import EVICTED, LOST, PRESENT
    from samkv_integrations.chroma.records import Records

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
    """A progress bar on standard error; yields a function of the done and the total number."""
    from tqdm.auto import tqdm

    with tqdm(desc=desc, unit="chunk") as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


def require_no_ray(given: Mapping[str, object], what: str) -> None:
    """Raises InvalidOption for an option that has no effect without ``--ray``."""
    for option, value in given.items():
        if value is not None:
            raise InvalidOption(f"{option} {value} is about {what} on Ray; give --ray too")
