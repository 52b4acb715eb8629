"""How commands find collections, load engines and open stores, and parse sizes and methods."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import typer

from samkv_integrations.cli import arguments as args
from samkv_integrations.cli.arguments import BUILTIN
from samkv_integrations.errors import EmptyInput, Given, InvalidOption, ModelNotFound, UnknownOption
from samkv_integrations.option import check_options
from samkv_integrations.options import DEFAULT_METHOD, EngineOptions, ModelOptions

if TYPE_CHECKING:
    from samkv_integrations.chroma.client import Database
    from samkv_integrations.chroma.embedding import Embeddings
    from samkv_integrations.chroma.link import ChromaLink
    from samkv_integrations.engine import Engine
    from samkv_integrations.frameworks.engine_args import ModelSource
    from samkv_integrations.methods import Method
    from samkv_integrations.methods.eviction import Eviction
    from samkv_integrations.store.disk import ChunkStore
    from samkv_integrations.store.indexed import IndexedStore


def words(text: str) -> list[str]:
    """The parts between commas, without empty ones."""
    return [part.strip() for part in text.split(",") if part.strip()]


@dataclass(frozen=True, kw_only=True)
class Answering:
    """The options that say how questions are answered."""

    method: Annotated[str | None, typer.Option(help="See 'samkv methods'. Default: auto.")] = None
    settings: Annotated[
        list[str] | None,
        args.further("--set", help="An option of the method, NAME=VALUE."),
    ] = None
    eviction: Annotated[
        str | None,
        args.further(help="How an answer evicts KV entries, or none. See 'samkv methods'."),
    ] = None
    eviction_budget: Annotated[
        float | None, args.further(help="Share of the prompt's KV entries that eviction keeps.")
    ] = None

    def methods(self, compare: Sequence[str] = ()) -> list[Method]:
        """The methods of ``compare``, else the given one, each with the settings that it has.

        Settings without a method apply to the default method. Without either the list is empty, and
        the engine chooses.

        Raises:
            UnknownOption: a method does not exist, or none of them has such an option.
            InvalidOption: a value has the wrong type, or is out of range.
        """
        if not (compare or self.method or self.settings):
            return []  # without a slow import

        from samkv_integrations.methods import get_method
        from samkv_integrations.methods.base import option_names, with_option

        default = self.method or (DEFAULT_METHOD if self.settings else None)
        methods = [get_method(name) for name in compare or filter(None, [default])]
        for setting in self.settings or ():
            name = setting.partition("=")[0]
            known = {option for method in methods for option in option_names(method)}
            if name not in known:
                called = ", ".join(method.name for method in methods)
                raise UnknownOption.among(f"option of {called}", name, known or {"none"})
            methods = [
                with_option(method, setting) if name in option_names(method) else method
                for method in methods
            ]
        return methods

    @property
    def chosen(self) -> Method | None:
        """The given method; None for the engine's. Raises as `methods` does."""
        return next(iter(self.methods()), None)

    @property
    def rule(self) -> Eviction | str | None:
        """The given eviction with the given budget; None and "none" as they are.

        Raises:
            UnknownOption: the eviction does not exist.
            InvalidOption: the budget is out of range, or there is no eviction.
        """
        if self.eviction is None and self.eviction_budget is None:
            return None  # without a slow import

        from samkv_integrations.methods.eviction import get_eviction, with_budget

        rule, budget = get_eviction(self.eviction), self.eviction_budget
        if budget is None:
            return rule or self.eviction
        if rule is None:
            raise InvalidOption(
                Given("eviction_budget", budget), " without an eviction; name one, or leave it out"
            )
        return with_budget(rule, budget)


@dataclass(frozen=True, kw_only=True)
class Retrieval:
    """The options that say which chunks a question is asked about, and how."""

    collection: Annotated[
        str | None,
        typer.Option(help="Name of the Chroma collection. Default: the only one, or documents."),
    ] = None
    top_k: Annotated[int, typer.Option(min=1, help="Chunks to retrieve.")] = 4
    max_new_tokens: Annotated[
        int,
        typer.Option("--max-new-tokens", "--max-tokens", min=1, help="Most tokens of the answer."),
    ] = 64
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Use the model's chat template. Default: yes, except for 'builtin'.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Asking(Retrieval):
    """A question, and the options that say which chunks it is asked about, and how."""

    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What to ask.")]

    def __post_init__(self) -> None:
        if not self.question.strip():
            raise EmptyInput("the question is empty; say what to ask")


def require_model(model: str) -> None:
    """Raises ModelNotFound, before a slow import, if ``model`` is a path that does not exist."""
    if model.startswith((".", "/")) and not Path(model).exists():
        raise ModelNotFound(f"{model} does not exist; give a folder, a GGUF file or a hub id")


@dataclass(frozen=True, kw_only=True)
class Ingested:
    """The settings of an ingest. model: an absolute path if it is a file or a folder.

    runtime: that ran the model; None for that of its name. dtype: ``auto`` if the runtime takes
    none.
    """

    model: str = BUILTIN
    runtime: str | None = None
    dtype: str = "auto"
    store_bits: int | None = None


@dataclass(frozen=True, kw_only=True)
class Embedded:
    """The options that say by which vectors chunks are found, beside their words."""

    embedding: Annotated[
        str | None,
        args.further(
            help="Find chunks by vectors too: chroma, a sentence-transformers id or folder, or the "
            "endpoint's model. Default: as ingested, else words alone."
        ),
    ] = None
    embedding_url: Annotated[
        str | None,
        args.further(
            metavar="URL",
            help="OpenAI-compatible endpoint of --embedding, such as Ollama's: "
            "http://HOST:PORT/v1. Default: as ingested.",
        ),
    ] = None

    @property
    def embeddings(self) -> Embeddings:
        """The embeddings of collections. Raises for a wrong URL or folder."""
        from samkv_integrations.chroma.embedding import Embeddings

        return Embeddings(self.embedding, self.embedding_url)


@dataclass(frozen=True, kw_only=True)
class CacheFolder:
    """The options that name the folder of chunk caches. kv_dir: None for ``kv`` in ``folder``."""

    folder: args.Folder = Path(".samkv")
    kv_dir: args.CacheFolder = None

    @property
    def kv(self) -> Path:
        """The folder of the chunk caches."""
        return self.kv_dir or self.folder / "kv"

    def store(self) -> ChunkStore:
        """The store, for all namespaces. Raises InvalidOption if it does not exist."""
        return Caches(folder=self.folder, kv_dir=self.kv_dir).store()


@dataclass(frozen=True, kw_only=True)
class Caches(CacheFolder):
    """The options that say where chunk caches are, and in which namespace."""

    namespace: Annotated[
        str,
        args.further(
            help="Namespace of the caches. Records have none: use another --collection as well."
        ),
    ] = ""
    remote: Annotated[
        str | None,
        args.further(
            envvar="SAMKV_REMOTE", help="Where machines share chunk caches: s3://BUCKET/PREFIX."
        ),
    ] = None

    def store(self, *, is_new: bool = True) -> ChunkStore:
        """The store of the namespace.

        is_new: whether to create it if there is a remote tier.

        Raises InvalidOption if it does not exist.
        """
        if not self.kv.is_dir() and not (self.remote and is_new):
            raise InvalidOption(
                f"{self.kv} does not exist; give the --dir that 'samkv ingest' used, or the kv_dir "
                "of a program as --kv-dir"
            )

        from samkv_integrations.store.disk import ChunkStore

        return ChunkStore(self.kv, namespace=self.namespace, remote=self.remote)


@dataclass(frozen=True, kw_only=True)
class Collections(Caches):
    """The options that say where chunk caches and the records of documents are."""

    chroma: Annotated[
        str | None,
        args.further(
            "--chroma",
            metavar="URL|FOLDER",
            help="Chroma server with the records, http://HOST:PORT, or an existing folder of "
            "Chroma. Default: chroma in --dir.",
        ),
    ] = None

    @property
    def database(self) -> Database:
        """The Chroma database. Raises InvalidOption if it cannot be opened."""
        from samkv_integrations.chroma.client import Database

        if self.chroma is not None and Path(self.chroma).is_dir():
            return Database(Path(self.chroma).resolve())
        return Database(self.folder / "chroma", self.chroma)

    def require_folder(self) -> None:
        """Raises InvalidOption if there can be no database."""
        if self.chroma is None and not self.folder.is_dir():
            raise InvalidOption(
                f"{self.folder} does not exist; give the --dir that 'samkv ingest' used"
            )

    def collection(self, given: str | None) -> str:
        """The name of the collection: the given one, else the only one, else ``documents``.

        Raises InvalidOption if there is no database, before anything slow is imported.
        """
        self.require_folder()
        names = [] if given else self.database.names()
        return given or (names[0] if len(names) == 1 else "documents")

    def require_own_records(self, database: Database, names: Sequence[str]) -> None:
        """Raises InvalidOption if all records of a collection have caches in another namespace.

        Otherwise its texts would be cached again, in this namespace. Records without caches pass.
        """
        from samkv_integrations.chroma.records import Records
        from samkv_integrations.store.index import EVICTED, LOST, PRESENT

        if not self.kv.is_dir():
            return
        places = replace(self, remote=None).store().index.places(None, PRESENT, EVICTED, LOST)
        own = {key for _, key, space in places if space == self.namespace}
        others = {key: space for _, key, space in places if space != self.namespace}
        for name in names if others else ():
            keys = Records(database.collection(name)).keys()
            found = sorted({others[key] for key in keys & others.keys()})
            if found and not keys & own:
                raise InvalidOption(
                    f"the records of collection {name!r} have their caches in namespace "
                    f"{found[0]!r}, not in {self.namespace!r}; give --namespace, and --collection "
                    "for each that is of that namespace"
                )


@dataclass(frozen=True, kw_only=True)
class Index(Collections, args.OfRuntime):
    """The options that say where documents are ingested, and by which model.

    model, runtime, dtype, store_bits: None for the values of the ingest.
    """

    model: Annotated[
        str | None,
        args.flag(ModelOptions, "model_name", "--model", default="as ingested, else builtin"),
    ] = None
    device: args.Device = "auto"
    dtype: Annotated[
        str | None, args.flag(ModelOptions, "dtype", default="as ingested, else auto")
    ] = None
    store_bits: Annotated[
        int | None,
        args.flag(EngineOptions, "store_bits", default="as ingested, else 4, on llama.cpp 8"),
    ] = None

    def __post_init__(self) -> None:
        check_options(ModelOptions, {"dtype": self.dtype or "auto"})
        check_options(EngineOptions, {"store_bits": self.store_bits})
        require_model(self.model or BUILTIN)

    def as_ingested(
        self, places: Sequence[tuple[str, str]], *, may_be_new: bool = False
    ) -> Ingested:
        """The given settings, else those of the collections' ingest, else the defaults.

        places: namespace and name of each collection; empty for all known collections. A new
        collection takes the settings of the others in the folder. may_be_new: whether the folder
        may be new, without an ingest.

        Raises InvalidOption if no model is given, and there was no ingest or one with several.
        """
        known, model = _remembered(self.kv), _absolute(self.model)
        keys = map(_key, places)
        found = [known[key] for key in keys if key in known] or [*known.values()]
        models = dict.fromkeys(one.model for one in found)
        if model is None and len(models) > 1:
            raise InvalidOption(
                f"the collections were ingested with {' and '.join(models)}; give one with --model"
                f"{'' if places else ', and --collection for each of its collections'}"
            )
        if model is None and places and not models and not may_be_new:
            raise InvalidOption(
                f"{self.kv} does not tell which model has cached the documents; give it "
                "with --model, or the --dir that 'samkv ingest' used"
            )
        same = [one for one in found if model in (None, one.model)]
        last = same[-1] if same else Ingested(model=model or BUILTIN)
        is_same = self.runtime in (None, last.runtime)
        return Ingested(
            model=last.model, runtime=self.runtime or last.runtime,
            dtype=self.dtype or (last.dtype if is_same else "auto"),
            store_bits=last.store_bits if self.store_bits is None else self.store_bits,
        )  # fmt: skip

    def source(
        self, given: Ingested, max_bytes: str | None = None, **options: Unpack[EngineOptions]
    ) -> ModelSource:
        """The source of an engine over the chunk caches.

        given: the result of `as_ingested`. max_bytes: most bytes of the caches from now on, such as
        ``20GB``; None for the limit that was set before. options: see `Engine`.
        """
        from samkv_integrations.frameworks.engine_args import ModelSource

        own: Any = options  # options with a flag are fields of a source
        return ModelSource(
            model_name=given.model, device_map=self.device, dtype=given.dtype,
            kv_dir=self.kv, kv_remote=self.remote, namespace=self.namespace,
            max_bytes=max_bytes, store_bits=given.store_bits, **own,
            **self.of_runtime(given.model) | {"runtime": given.runtime},
        )  # fmt: skip

    def engine(self, given: Ingested, **options: Unpack[EngineOptions]) -> Engine:
        """An engine over the chunk caches, whose folder is created if necessary; see `source`."""
        from samkv_integrations.frameworks.engine_args import engine_of

        return engine_of(self.source(given, **options))

    def links(
        self,
        names: Sequence[str],
        embeddings: Embeddings | None = None,
        *,
        must_have_caches: bool = True,
        **options: Unpack[EngineOptions],
    ) -> list[ChromaLink]:
        """The collections, linked to one engine. options: see `Engine`.

        embeddings: by which questions find chunks, besides words. must_have_caches: whether a store
        with caches of other models alone is an error.

        Raises InvalidOption if a collection does not exist or belongs to another namespace, or if
        its caches are another model's.
        """
        from samkv_integrations.chroma.link import ChromaLink
        from samkv_integrations.store.indexed import require

        database = self.database
        opened = [database.collection(name) for name in names]
        self.require_own_records(database, names)
        vectors = [embeddings.of(one) if embeddings else None for one in opened]
        engine = self.engine(
            self.as_ingested([(self.namespace, name) for name in names]), **options
        )
        if must_have_caches:
            require(engine.store, engine.fingerprint)
        return [ChromaLink(one, engine, by) for one, by in zip(opened, vectors, strict=True)]


_NOTE = "ingested"


def remember(
    kv: Path, store: IndexedStore, place: tuple[str, str], ingested: Ingested
) -> Ingested | None:
    """Keep the settings of a collection's ingest beside the caches; returns the former ones."""
    before = _remembered(kv)
    known = before | {_key(place): ingested}
    store.put_note(_NOTE, json.dumps({key: asdict(one) for key, one in known.items()}))
    return before.get(_key(place))


def _remembered(kv: Path) -> dict[str, Ingested]:
    from samkv_integrations.store.folder import read_small

    # a damaged note counts as missing
    with suppress(OSError, ValueError, TypeError, LookupError, AttributeError):
        found = json.loads(read_small(kv / f"{_NOTE}.json"))
        return {
            key: Ingested(
                model=str(one.get("path") or one["model"]),  # 0.1 wrote "path" beside the name
                runtime=str(one.get("runtime", "transformers")),  # which alone was there before
                dtype=str(one["dtype"]), store_bits=int(one["store_bits"]),
            )
            for key, one in found.items()
        }  # fmt: skip
    return {}


def _absolute(model: str | None) -> str | None:
    """The absolute path of a model that is a file or a folder; other names as they are."""
    is_path = model not in (None, BUILTIN, "smollm2") and Path(str(model)).exists()
    return str(Path(str(model)).resolve()) if is_path else model


def _key(place: tuple[str, str]) -> str:
    return json.dumps(place)
