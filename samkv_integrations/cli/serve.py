"""``samkv serve``, by one process or, with ``--ray``, by several replicas."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import typer

from samkv_integrations.cli import arguments as args
from samkv_integrations.cli.loading import (
    BUILTIN,
    Index,
    eviction_of,
    given_methods,
    ray_pool,
    require_own_records,
    store_in,
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
    on_ray: args.ServedOnRay = False, ray_address: args.RayAddress = None,
    replicas: args.Replicas = None, replica_cpus: args.ReplicaCpus = None,
    replica_gpus: args.ReplicaGpus = None,
) -> None:  # fmt: skip
    """Serve OpenAI's API: chat completions, completions, and questions about collections.

    Texts of cached chunks are found in prompts, so that clients need no change. docs/server.md and
    docs/ray.md describe further options.
    """
    from samkv_integrations.cache.index.index import bytes_of
    from samkv_integrations.engine.scheduler import Limits

    try:
        from samkv_integrations.server.run import ServerSource, address_of, listen_on, run
        from samkv_integrations.server.service import Settings
        from samkv_integrations.server.tenancy import ApiKeys, Tenant
    except ImportError as error:
        raise MissingExtra.of(error.name or "fastapi", "server") from error

    check_options(EngineOptions, {"store_bits": index.store_bits})
    check_options(OwnAnswerOptions, {"timeout": timeout})
    limits = Limits(
        max_batch=max_batch, max_waiting=max_waiting,
        max_kv_bytes=None if max_kv is None else bytes_of("max_kv", max_kv),
    )  # fmt: skip
    pool = ray_pool(on_ray, "replica", ray_address, replicas, replica_cpus, replica_gpus)
    if pool and not pool.n_gpus:
        if index.device not in ("auto", "cpu"):
            raise InvalidOption(
                f"--device {index.device} for replicas without a GPU; give --replica-gpus"
            )
        index = replace(index, device="cpu")
    keys = ApiKeys(
        _keys_text(api_keys),
        Tenant(namespace=index.namespace, collections=tuple(collection or ())),
    )
    namespaces = {tenant.namespace for tenant in keys.tenants}
    asked = [(tenant.namespace, name) for tenant in keys.tenants for name in tenant.collections]
    ingested = index.as_ingested(asked)
    model, folder = ingested.model, index.folder
    chosen = [*given_methods([method] if method else [], settings or []), None][0]
    source = ServerSource(
        model=model, device=index.device, dtype=ingested.dtype, weights=index.weights,
        folder=folder, chroma=index.chroma, remote=index.remote, limits=limits,
        options=EngineOptions(
            **options, method=chosen, eviction=eviction_of(eviction, eviction_budget),
            store_bits=ingested.store_bits,
            # equal parts, so that no namespace affects the times of another
            prefix_bytes=bytes_of("prefix_bytes", prefix_bytes) // len(namespaces),
        ),
        keys=keys,
        settings=Settings(
            model_name=name or (Path(model).resolve().name if Path(model).exists() else model),
            most_tokens=max_tokens, timeout_s=timeout, logs_prompts=log_prompts,
            max_body_bytes=bytes_of("max_body", max_body), grace_s=grace,
        ),
    )  # fmt: skip
    if api_keys is not None and not source.keys:
        raise InvalidOption(f"--api-keys {api_keys} holds no key; give one a line, or leave it out")

    def say(at: str) -> None:
        typer.echo(f"samkv: serving {source.settings.model_name} on {at}/v1", err=True)

    with listen_on(host, port, source.keys) as listening:  # before the model, which loads slowly
        database = source.database()
        for _, wanted in asked:
            database.collection(wanted)
        database.check([wanted for _, wanted in asked])  # here, where a crash would come again
        for tenant in source.keys.tenants:
            if tenant.collections and (folder / "kv").is_dir():
                try:
                    store = store_in(folder, tenant.namespace)
                    require_own_records(store, database, tenant.collections)
                except InvalidOption as error:
                    whose = f"collections of namespace {tenant.namespace!r}"
                    raise InvalidOption(f"{whose}: {error}") from None
        if pool is None:
            use_threads_for(model)
            run(source, listening, say)
            return
        at, port = address_of(listening), listening.getsockname()[1]

    from samkv_integrations.cache.disk import ChunkStore
    from samkv_integrations.cluster.serve import Replicas, serving
    from samkv_integrations.model.loading import load_tokenizer

    load_tokenizer(model)  # a wrong name is found out before a replica begins
    for tenant in source.keys.tenants:  # so that none is made by two replicas at once
        ChunkStore(folder / "kv", namespace=tenant.namespace, remote=index.remote)
    several = Replicas(pool=pool, n_at_once=max_batch, n_waiting=max_waiting, grace_s=grace)
    n_threads = 1 if model == BUILTIN else pool.n_cpus
    told, seen = threading.Event(), list[int]()

    def take(number: int, _: object) -> None:
        seen.append(number)
        told.set()

    with serving(source.replica, several, host, port, n_threads=n_threads):
        say(at)
        before = {one: signal.signal(one, take) for one in (signal.SIGINT, signal.SIGTERM)}
        told.wait()
        for one, handler in before.items():  # the next signal is not waited for
            signal.signal(one, handler)
    if seen[0] == signal.SIGTERM:
        raise typer.Exit(128 + signal.SIGTERM)


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
