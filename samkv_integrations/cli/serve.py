"""``samkv serve``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from samkv_integrations.cli import arguments as args
from samkv_integrations.cli.loading import use_threads_for
from samkv_integrations.cli.method_options import eviction_of, given_methods
from samkv_integrations.cli.replicas import replicas_of, require_device, serve_on_ray
from samkv_integrations.cli.sizes import bytes_of
from samkv_integrations.cli.stores import require_own_records, store_in
from samkv_integrations.cluster.replicas import Replicas
from samkv_integrations.engine.options import EngineOptions, check_given_bits, check_timeout
from samkv_integrations.engine.scheduler import Limits
from samkv_integrations.errors import InvalidOption, MissingExtra
from samkv_integrations.server.keys import ApiKeys, Tenant
from samkv_integrations.server.listen import listen_on

if TYPE_CHECKING:
    from samkv_integrations.server.source import ServerSource

KEYS_VARIABLE = "SAMKV_API_KEYS"


def serve(
    collection: args.Served = None, folder: args.Folder = Path(".samkv"),
    chroma: args.ChromaServer = None, model: args.ModelName = "builtin",
    name: args.ServedName = None, host: args.Host = "127.0.0.1", port: args.Port = 8000,
    namespace: args.Namespace = "", remote: args.Remote = None, api_keys: args.ApiKeyFile = None,
    device: args.Device = "auto", dtype: args.Dtype = "auto",
    store_bits: args.CacheBits = None,
    method: args.ServedMethod = None, settings: args.Settings = None,
    eviction: args.EvictionName = None, eviction_budget: args.EvictionBudget = None,
    max_batch: args.MaxBatch = 8, max_waiting: args.MaxWaiting = 64, max_kv: args.MaxKv = None,
    max_tokens: args.ServedTokens = 1024, max_body: args.MaxBody = "8MB",
    timeout: args.Timeout = None, grace: args.EndGrace = 30, log_prompts: args.LogPrompts = False,
    on_ray: args.ServedOnRay = False, ray_address: args.RayAddress = None,
    replicas: args.Replicas = None, min_replicas: args.MinReplicas = None,
    max_replicas: args.MaxReplicas = None, replica_cpus: args.ReplicaCpus = None,
    replica_gpus: args.ReplicaGpus = None, route: args.Route = None,
) -> None:  # fmt: skip
    """Answer OpenAI's clients: chat completions, completions, and questions about collections.

    Texts of cached chunks are found in prompts, so a client gains without a change.
    """
    check_given_bits(store_bits)
    check_timeout(timeout)
    for option, number, least in (("--max-tokens", max_tokens, 1), ("--grace", grace, 0)):
        if number < least:
            raise InvalidOption(f"{option} {number}; give at least {least}")
    chosen = [*given_methods([method] if method else [], settings or []), None][0]
    rule = eviction_of(eviction, eviction_budget)
    most_kv = None if max_kv is None else bytes_of("--max-kv", max_kv)
    limits = Limits(max_batch=max_batch, max_waiting=max_waiting, max_kv_bytes=most_kv)
    several = replicas_of(
        on_ray, limits, grace, ray_address=ray_address, replicas=replicas,
        min_replicas=min_replicas, max_replicas=max_replicas, replica_cpus=replica_cpus,
        replica_gpus=replica_gpus, route=route,
    )  # fmt: skip
    everybody = Tenant(namespace=namespace, collections=tuple(collection or ()))
    _begin(
        several, (host, port), _keys_of(api_keys, everybody),
        {"model_name": name or _name_of(model), "most_tokens": max_tokens, "timeout_s": timeout,
         "logs_prompts": log_prompts, "max_body_bytes": bytes_of("--max-body", max_body),
         "grace_s": grace},
        model=model, device=device if several is None else require_device(several, device),
        dtype=dtype, folder=folder, chroma=chroma, remote=remote, limits=limits,
        options=EngineOptions(method=chosen, eviction=rule, store_bits=store_bits),
    )  # fmt: skip


def _begin(
    several: Replicas | None, address: tuple[str, int], keys: ApiKeys, settings: dict[str, Any],
    **of_source: Any,  # noqa: ANN401
) -> None:  # fmt: skip
    """Serve, once it is known that the address is free and the collections are there."""
    try:
        from samkv_integrations.server.run import Settings, address_of, run
        from samkv_integrations.server.source import ServerSource
    except ImportError as error:
        raise MissingExtra.of(error.name or "fastapi", "server") from error
    source = ServerSource(keys=keys, settings=Settings(**settings), **of_source)

    def say(at: str) -> None:
        typer.echo(f"samkv: serving {source.settings.model_name} on {at}/v1", err=True)

    with listen_on(*address, keys) as listening:  # before a model is loaded for nothing
        for tenant in keys.tenants:
            _require_own(source, tenant)
        if several is None:
            use_threads_for(source.model)
            run(source.tenancy(), keys, listening, source.settings, say)
            return
        at, port = address_of(listening), listening.getsockname()[1]
    serve_on_ray(source, several, (address[0], port), lambda: say(at))


def _keys_of(file: Path | None, everybody: Tenant) -> ApiKeys:
    keys = ApiKeys(_keys_text(file), everybody)
    if file is not None and not keys:
        raise InvalidOption(f"--api-keys {file} holds no key; give one a line, or leave it out")
    return keys


def _keys_text(file: Path | None) -> str:
    """The lines of the file of keys; without one, those of the variable."""
    if file is None:
        return os.environ.get(KEYS_VARIABLE, "").replace(";", "\n")
    if os.environ.get(KEYS_VARIABLE):
        raise InvalidOption(f"--api-keys and the variable {KEYS_VARIABLE} are both given; give one")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(f"--api-keys {file} cannot be read: {error}") from error
    return text


def _require_own(source: ServerSource, tenant: Tenant) -> None:
    """See that its collections are there, and its own. Raises as their opening does."""
    names, database = tenant.collections, source.database()
    for name in names:
        database.collection(name)
    if names and (source.folder / "kv").is_dir():
        store = store_in(source.folder, tenant.namespace)
        try:
            require_own_records(store, database, names)
        except InvalidOption as error:
            raise InvalidOption(f"collections of namespace {tenant.namespace!r}: {error}") from None


def _name_of(model: str) -> str:
    """What clients call a model: a folder or file by its last name."""
    return Path(model).resolve().name if Path(model).exists() else model
