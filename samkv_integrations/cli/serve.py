"""``samkv serve``."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from samkv_integrations.cli.loading import Answering, Index, use_threads_for
from samkv_integrations.errors import InvalidOption, MissingExtra
from samkv_integrations.options import (
    EngineOptions,
    OwnAnswerOptions,
    OwnEngineOptions,
    check_options,
)

KEYS_VARIABLE = "SAMKV_API_KEYS"


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Where the server listens, what it serves, and its limits."""

    collection: list[str] | None = None
    """A collection that clients may ask; repeat for more."""
    name: Annotated[str | None, typer.Option(hidden=True)] = None
    """The model's name for clients."""
    host: str = "127.0.0.1"
    """Address to listen on; other machines need API keys."""
    port: int = 8000
    """Port to listen on; 0 for a free one."""
    api_keys: Path | None = None
    """Lines of KEY, KEY NAMESPACE, KEY NAMESPACE COLLECTION..."""
    max_batch: int = 8
    """Most answers that are decoded together."""
    max_waiting: Annotated[int, typer.Option(hidden=True)] = 64
    """Most answers that wait."""
    max_kv: Annotated[str | None, typer.Option(hidden=True)] = None
    """Most KV bytes of all running answers: 8GB."""
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "--max-new-tokens", min=1, hidden=True)
    ] = 1024
    """Most tokens of an answer whose client names no number."""
    max_body: Annotated[str, typer.Option(hidden=True)] = "8MB"
    """Most bytes of a request, such as 8MB."""
    timeout: float | None = None
    """Seconds, waiting included, after which an incomplete answer ends. Default: no limit."""
    grace: Annotated[int, typer.Option(min=0, hidden=True)] = 30
    """Seconds for running answers at shutdown."""
    log_prompts: Annotated[bool, typer.Option("--log-prompts", hidden=True)] = False
    """Log prompts."""

    @property
    def keys_text(self) -> str:
        """The lines of the file with keys; without a file, those of the variable."""
        variable, file = os.environ.get(KEYS_VARIABLE, ""), self.api_keys
        if file is None:
            return variable.replace(";", "\n")
        if variable:
            raise InvalidOption(
                f"--api-keys and the variable {KEYS_VARIABLE} are both given; give one"
            )
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidOption(
                f"--api-keys {file} cannot be read ({error}); give a file with a key in each line"
            ) from error


def serve(index: Index, options: OwnEngineOptions, serving: Serving, answering: Answering) -> None:
    """Serve OpenAI's API: chat completions, completions, and questions about collections.

    Texts of cached chunks are found in prompts, so that clients need no change. docs/server.md
    describes further options.
    """
    text = serving.keys_text  # refused before anything is imported, which takes time

    from samkv_integrations.runtimes.transformers.loading import load_model
    from samkv_integrations.serving.scheduler import Limits, Scheduler
    from samkv_integrations.store.index import bytes_of

    try:
        from samkv_integrations.server.app import create_app
        from samkv_integrations.server.run import listen_on, run
        from samkv_integrations.server.service import Settings
        from samkv_integrations.server.tenancy import ApiKeys, Tenancy, Tenant
    except ImportError as error:
        raise MissingExtra.of(error.name or "fastapi", "server") from error

    check_options(EngineOptions, {"store_bits": index.store_bits})
    check_options(OwnAnswerOptions, {"timeout": serving.timeout})
    limits = Limits(
        max_batch=serving.max_batch, max_waiting=serving.max_waiting,
        max_kv_bytes=None if serving.max_kv is None else bytes_of("max_kv", serving.max_kv),
    )  # fmt: skip
    collections = tuple(serving.collection or ())
    keys = ApiKeys(text, Tenant(namespace=index.namespace, collections=collections))
    if serving.api_keys is not None and not keys:
        raise InvalidOption(
            f"--api-keys {serving.api_keys} holds no key; give one a line, or leave it out"
        )
    namespaces = {tenant.namespace for tenant in keys.tenants}
    asked = [(tenant.namespace, name) for tenant in keys.tenants for name in tenant.collections]
    database = index.database
    for _, wanted in asked:
        database.collection(wanted)
    ingested = index.as_ingested(asked)
    model = ingested.model
    of_engines = EngineOptions(
        **options, method=answering.chosen, eviction=answering.rule,
        store_bits=ingested.store_bits,
    )  # fmt: skip
    settings = Settings(
        model_name=serving.name or (Path(model).resolve().name if Path(model).exists() else model),
        most_tokens=serving.max_tokens, timeout_s=serving.timeout,
        logs_prompts=serving.log_prompts, max_body_bytes=bytes_of("max_body", serving.max_body),
        grace_s=serving.grace,
    )  # fmt: skip

    def say(at: str) -> None:
        typer.echo(f"samkv: serving {settings.model_name} on {at}/v1", err=True)

    # before the model, which loads slowly
    with listen_on(serving.host, serving.port, keys) as listening:
        database.check([wanted for _, wanted in asked])  # here, where a crash would come again
        for tenant in keys.tenants:
            own = replace(index, namespace=tenant.namespace)
            own.require_own_records(database, tenant.collections)
        use_threads_for(model)
        loaded = load_model(model, device=index.device, dtype=ingested.dtype, weights=index.weights)
        # equal parts, so that no namespace affects the times of another
        n_parts = len(namespaces)
        of_engines["hot_bytes"] = hot_budget(loaded, of_engines.get("hot_bytes")) // n_parts
        kept_bytes = prefix_budget(loaded, of_engines.get("prefix_bytes"))
        of_engines["prefix_bytes"] = kept_bytes // n_parts
        tenancy = Tenancy(
            Scheduler(loaded, limits), index.folder, index.remote, database=database, **of_engines
        )
        for tenant in keys.tenants:  # here, where a folder that cannot be used ends the command
            tenancy.engine(tenant).chunks.warn_if_none_fits()
        run(create_app(tenancy, keys, settings), listening, settings.grace_s, say)
