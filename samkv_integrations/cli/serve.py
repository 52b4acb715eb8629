"""``samkv serve``."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from samkv_integrations.cli import arguments as args
from samkv_integrations.cli.loading import (
    Index,
    eviction_of,
    given_methods,
    require_own_records,
    use_threads_for,
)
from samkv_integrations.engine.options import (
    EngineOptions,
    OwnAnswerOptions,
    OwnEngineOptions,
    check_options,
)
from samkv_integrations.errors import InvalidOption, MissingExtra

KEYS_VARIABLE = "SAMKV_API_KEYS"


def serve(
    index: Index, options: OwnEngineOptions, collection: args.Served = None,
    name: args.ServedName = None, host: args.Host = "127.0.0.1", port: args.Port = 8000,
    api_keys: args.ApiKeyFile = None,
    method: args.MethodName = None, settings: args.Settings = None,
    eviction: args.EvictionName = None, eviction_budget: args.EvictionBudget = None,
    max_batch: args.MaxBatch = 8, max_waiting: args.MaxWaiting = 64, max_kv: args.MaxKv = None,
    prefix_bytes: args.PrefixBytes = "512MB",
    max_tokens: args.ServedTokens = 1024, max_body: args.MaxBody = "8MB",
    timeout: args.Timeout = None, grace: args.EndGrace = 30, log_prompts: args.LogPrompts = False,
) -> None:  # fmt: skip
    """Serve OpenAI's API: chat completions, completions, and questions about collections.

    Texts of cached chunks are found in prompts, so that clients need no change. docs/server.md
    describes further options.
    """
    from samkv_integrations.cache.index.index import bytes_of
    from samkv_integrations.engine.chunks import hot_budget
    from samkv_integrations.engine.scheduler import Limits, Scheduler
    from samkv_integrations.model.loading import load_model

    try:
        from samkv_integrations.server.app import create_app
        from samkv_integrations.server.run import listen_on, run
        from samkv_integrations.server.service import Settings
        from samkv_integrations.server.tenancy import ApiKeys, Tenancy, Tenant
    except ImportError as error:
        raise MissingExtra.of(error.name or "fastapi", "server") from error

    check_options(EngineOptions, {"store_bits": index.store_bits})
    check_options(OwnAnswerOptions, {"timeout": timeout})
    limits = Limits(
        max_batch=max_batch, max_waiting=max_waiting,
        max_kv_bytes=None if max_kv is None else bytes_of("max_kv", max_kv),
    )  # fmt: skip
    keys = ApiKeys(
        _keys_text(api_keys),
        Tenant(namespace=index.namespace, collections=tuple(collection or ())),
    )
    if api_keys is not None and not keys:
        raise InvalidOption(f"--api-keys {api_keys} holds no key; give one a line, or leave it out")
    namespaces = {tenant.namespace for tenant in keys.tenants}
    asked = [(tenant.namespace, name) for tenant in keys.tenants for name in tenant.collections]
    ingested = index.as_ingested(asked)
    model = ingested.model
    chosen = [*given_methods([method] if method else [], settings or []), None][0]
    of_engines = EngineOptions(
        **options, method=chosen, eviction=eviction_of(eviction, eviction_budget),
        store_bits=ingested.store_bits,
        # equal parts, so that no namespace affects the times of another
        prefix_bytes=bytes_of("prefix_bytes", prefix_bytes) // len(namespaces),
    )  # fmt: skip
    served = Settings(
        model_name=name or (Path(model).resolve().name if Path(model).exists() else model),
        most_tokens=max_tokens, timeout_s=timeout, logs_prompts=log_prompts,
        max_body_bytes=bytes_of("max_body", max_body), grace_s=grace,
    )  # fmt: skip

    def say(at: str) -> None:
        typer.echo(f"samkv: serving {served.model_name} on {at}/v1", err=True)

    with listen_on(host, port, keys) as listening:  # before the model, which loads slowly
        database = index.database
        for _, wanted in asked:
            database.collection(wanted)
        database.check([wanted for _, wanted in asked])  # here, where a crash would come again
        for tenant in keys.tenants:
            require_own_records(index.folder, tenant.namespace, database, tenant.collections)
        use_threads_for(model)
        loaded = load_model(model, device=index.device, dtype=ingested.dtype, weights=index.weights)
        of_engines["hot_bytes"] = hot_budget(loaded, of_engines.get("hot_bytes")) // len(namespaces)
        tenancy = Tenancy(
            Scheduler(loaded, limits), index.folder, index.remote, database=database, **of_engines
        )
        for tenant in keys.tenants:  # here, where a folder that cannot be used ends the command
            tenancy.engine(tenant).chunks.warn_if_none_fits()
        run(create_app(tenancy, keys, served), listening, served.grace_s, say)


def _keys_text(file: Path | None) -> str:
    """The lines of the file with keys; without a file, those of the variable."""
    variable = os.environ.get(KEYS_VARIABLE, "")
    if file is None:
        return variable.replace(";", "\n")
    if variable:
        raise InvalidOption(f"--api-keys and the variable {KEYS_VARIABLE} are both given; give one")
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(
            f"--api-keys {file} cannot be read ({error}); give a file with a key in each line"
        ) from error
