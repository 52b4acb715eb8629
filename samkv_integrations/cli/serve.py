"""``samkv serve``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samkv_integrations.cli import arguments as args
from samkv_integrations.cli.loading import Answering, Embedded, Index, Ingested
from samkv_integrations.errors import InvalidOption, MissingExtra, UnknownOption
from samkv_integrations.option import bytes_of, check_options
from samkv_integrations.options import AnswerOptions, EngineOptions

if TYPE_CHECKING:
    from samkv_integrations.server.service import Settings
    from samkv_integrations.server.tenancy import ApiKeys, Tenancy, Tenant

KEYS_VARIABLE = "SAMKV_API_KEYS"


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Where the server listens, what it serves, and its limits."""

    collection: Annotated[
        list[str] | None, typer.Option(help="A collection that clients may ask; repeat for more.")
    ] = None
    name: Annotated[str | None, typer.Option(hidden=True, help="The model's name for clients.")] = (
        None
    )
    host: Annotated[
        str, typer.Option(help="Address to listen on; other machines need API keys.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for a free one.")] = 8000
    api_keys: Annotated[
        Path | None, typer.Option(help="Lines of KEY, KEY NAMESPACE, KEY NAMESPACE COLLECTION...")
    ] = None
    max_batch: Annotated[
        int, typer.Option(min=1, help="Most answers that are decoded together.")
    ] = 8
    max_waiting: Annotated[
        int, typer.Option(min=0, hidden=True, help="Most answers that wait.")
    ] = 64
    max_kv: Annotated[
        str | None, typer.Option(hidden=True, help="Most KV bytes of all running answers: 8GB.")
    ] = None
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens", "--max-new-tokens", min=1, hidden=True,
            help="Most tokens of an answer whose client names no number.",
        ),
    ] = 1024  # fmt: skip
    max_body: Annotated[
        str, typer.Option(hidden=True, help="Most bytes of a request, such as 8MB.")
    ] = "8MB"
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(hidden=True, help="Origin of web pages that may use it; repeat for more."),
    ] = None
    lenient: Annotated[
        bool,
        typer.Option("--lenient", hidden=True, help="Ignore fields that it does not know."),
    ] = False
    timeout: Annotated[float | None, args.flag(AnswerOptions, "timeout")] = None
    grace: Annotated[
        int, typer.Option(min=0, hidden=True, help="Seconds for running answers at shutdown.")
    ] = 30
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", hidden=True, help="Log prompts.")
    ] = False

    @property
    def keys_text(self) -> str:
        """The lines of the file with keys; without a file, those of the variable."""
        variable, file = os.environ.get(KEYS_VARIABLE, ""), self.api_keys
        if file is None:
            return variable.replace(";", "\n")
        if variable:
            raise InvalidOption(
                f"--api-keys and the variable {KEYS_VARIABLE} are both given; give only one"
            )
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidOption(
                f"--api-keys {file} cannot be read ({error}); give a file with a key in each line"
            ) from error


def serve(
    index: Index, options: EngineOptions, serving: Serving, answering: Answering,
    embedded: Embedded,
) -> None:  # fmt: skip
    """Serve OpenAI's API: chat completions, completions, and questions about collections.

    Texts of cached chunks are found in prompts, so that clients need no change. docs/server.md
    describes further options.
    """
    given = ServerOptions(index, options, serving, answering, embedded)
    keys = given.keys()
    try:
        from samkv_integrations.server.app import create_app
        from samkv_integrations.server.run import listen_on, run
    except ImportError as error:
        raise MissingExtra.of(error.name or "fastapi", "server") from error

    ingested = given.checked(keys)
    # before the model, which loads slowly
    with listen_on(serving.host, serving.port, keys) as listening:
        tenancy, settings = given.opened(keys, ingested)

        def say(at: str) -> None:
            typer.echo(f"samkv: serving {settings.model_name} on {at}/v1", err=True)

        run(create_app(tenancy, keys, settings), listening, serving.grace, say)


@dataclass(frozen=True)
class ServerOptions:
    """The options of a server, which can be pickled."""

    index: Index
    options: EngineOptions
    serving: Serving
    answering: Answering
    embedded: Embedded

    def keys(self) -> ApiKeys:
        """The API keys. Raises, before slow imports, for these and other options that are wrong."""
        serving, index = self.serving, self.index
        text = serving.keys_text
        check_options(EngineOptions, self.options)
        check_options(AnswerOptions, {"timeout": serving.timeout})
        for name, size in (("max_kv", serving.max_kv), ("max_body", serving.max_body)):
            if size is not None:
                bytes_of(name, size)
        if serving.collection:
            index.require_folder()

        from samkv_integrations.server.tenancy import ApiKeys, Tenant

        collections = tuple(serving.collection or ())
        keys = ApiKeys(text, Tenant(namespace=index.namespace, collections=collections))
        if serving.api_keys is not None and not keys:
            raise InvalidOption(
                f"--api-keys {serving.api_keys} holds no key; give one in each line, or leave it "
                "out"
            )
        if unseen := {*collections} - {name for _, name in asked_by(keys)}:
            raise InvalidOption(
                f"--collection {min(unseen)}: every key names a namespace, and so the collections "
                "that it may ask; add this one to lines of keys, or leave it out"
            )
        return keys

    def checked(self, keys: ApiKeys) -> Ingested:
        """The settings of the ingest. Checks what can be checked before a model is loaded.

        Raises UnknownOption if a collection or a method does not exist, InvalidOption for an option
        that cannot be used, MissingExtra if the runtime is not installed.
        """
        from samkv_integrations.runtimes import checked_runtime

        index, asked = self.index, asked_by(keys)
        _ = self.answering.chosen, self.answering.rule  # each may raise
        database, embeddings = index.database, self.embedded.embeddings
        for tenant in keys.tenants:
            with self._named(tenant):
                for name in tenant.collections:
                    database.collection(name)
        for _, name in asked:
            embeddings.of(database.collection(name))  # loads nothing
        database.check([name for _, name in asked])  # here, where a crash would come again
        for tenant in keys.tenants:
            with self._named(tenant):
                own = replace(index, namespace=tenant.namespace)
                own.require_own_records(database, tenant.collections)
        ingested = index.as_ingested(asked)
        checked_runtime(ingested.model, **self._of_runtime(ingested))
        return ingested

    def _of_runtime(self, ingested: Ingested) -> dict[str, Any]:
        """The options of `load_runtime`."""
        of_runtime = self.index.of_runtime(ingested.model) | {"runtime": ingested.runtime}
        return {"device": self.index.device, "dtype": ingested.dtype, **of_runtime}

    @contextmanager
    def _named(self, tenant: Tenant) -> Iterator[None]:
        """Inside this block, errors about collections on a key's own line say so."""
        try:
            yield
        except (InvalidOption, UnknownOption) as error:
            if tenant.collections == tuple(self.serving.collection or ()):
                raise
            raise InvalidOption(
                f"API keys, a line of namespace {tenant.namespace!r} with "
                f"{' '.join(tenant.collections)}: {error}"
            ) from error

    def opened(self, keys: ApiKeys, ingested: Ingested) -> tuple[Tenancy, Settings]:
        """Load the model, and open the store of each namespace.

        ingested: the result of `checked`. Raises InvalidOption or StoreError if one of them cannot
        be used.
        """
        from samkv_integrations.engine import kept_budget
        from samkv_integrations.runtimes import load_runtime
        from samkv_integrations.server.service import Settings
        from samkv_integrations.server.tenancy import Tenancy
        from samkv_integrations.serving.fairness import FairTurns
        from samkv_integrations.serving.scheduler import Scheduler
        from samkv_integrations.serving.turns import Limits

        index, serving = self.index, self.serving
        database, embeddings = index.database, self.embedded.embeddings
        for _, wanted in asked_by(keys):
            embedding = embeddings.of(database.collection(wanted))
            if embedding is not None:
                embedding.embed_question("a question")  # loads it, and fails now if it must
        model = ingested.model
        of_engines: EngineOptions = {
            **self.options, "method": self.answering.chosen, "eviction": self.answering.rule,
            "store_bits": ingested.store_bits,
        }  # fmt: skip
        is_path = Path(model).exists()
        settings = Settings(
            model_name=serving.name or (Path(model).resolve().name if is_path else model),
            most_tokens=serving.max_tokens, timeout_s=serving.timeout,
            logs_prompts=serving.log_prompts,
            max_body_bytes=bytes_of("max_body", serving.max_body),
            cors_origins=serving.cors_origin or (), is_lenient=serving.lenient,
        )  # fmt: skip
        loaded = load_runtime(model, **self._of_runtime(ingested))
        # equal parts, so that no namespace affects the times of another
        n_parts = len({tenant.namespace for tenant in keys.tenants})
        of_engines["hot_bytes"] = loaded.hot_budget(of_engines.get("hot_bytes")) // n_parts
        kept = kept_budget(loaded, of_engines.get("prefix_bytes"))
        of_engines["prefix_bytes"] = kept // n_parts
        max_kv = None if serving.max_kv is None else bytes_of("max_kv", serving.max_kv)
        limits = Limits(
            max_batch=serving.max_batch, max_waiting=serving.max_waiting, max_kv_bytes=max_kv
        )
        tenancy = Tenancy(
            Scheduler(loaded, limits, turns=FairTurns),
            index.folder,
            index.remote,
            kv_dir=index.kv,
            database=database,
            embeddings=embeddings,
            **of_engines,
        )
        for tenant in keys.tenants:  # an unusable folder must fail now
            tenancy.engine(tenant).chunks.warn_if_none_fits()
        return tenancy, settings


def asked_by(keys: ApiKeys) -> list[tuple[str, str]]:
    """Namespace and name of each collection that a key may ask."""
    return [(tenant.namespace, name) for tenant in keys.tenants for name in tenant.collections]
