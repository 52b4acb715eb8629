"""``samkv serve``."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from samkv_integrations.cache.quantise import DEFAULT_STORE_BITS, check_store_bits
from samkv_integrations.chroma.client import open_collection
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli.loading import use_threads_for
from samkv_integrations.cli.method_options import eviction_of, methods_of
from samkv_integrations.cli.sizes import bytes_of
from samkv_integrations.cli.stores import require_own_records, store_in
from samkv_integrations.engine.options import check_timeout
from samkv_integrations.engine.scheduler import Limits, Scheduler
from samkv_integrations.errors import InvalidOption, MissingExtra
from samkv_integrations.model.loading import load_model
from samkv_integrations.server.keys import ApiKeys, Tenant
from samkv_integrations.server.listen import listen_on
from samkv_integrations.server.tenancy import Tenancy

KEYS_VARIABLE = "SAMKV_API_KEYS"


def serve(
    collection: args.Served = None, folder: args.Folder = Path(".samkv"),
    model: args.ModelName = "builtin", name: args.ServedName = None,
    host: args.Host = "127.0.0.1", port: args.Port = 8000,
    namespace: args.Namespace = "", remote: args.Remote = None, api_keys: args.ApiKeyFile = None,
    device: args.Device = "auto", dtype: args.Dtype = "auto",
    store_bits: args.StoreBits = DEFAULT_STORE_BITS,
    method: args.ServedMethod = "auto", settings: args.Settings = None,
    eviction: args.EvictionName = None, eviction_budget: args.EvictionBudget = None,
    max_batch: args.MaxBatch = 8, max_waiting: args.MaxWaiting = 64, max_kv: args.MaxKv = None,
    max_tokens: args.ServedTokens = 1024, max_body: args.MaxBody = "8MB",
    timeout: args.Timeout = None, grace: args.EndGrace = 30, log_prompts: args.LogPrompts = False,
) -> None:  # fmt: skip
    """Answer OpenAI's clients: chat completions, completions, and questions about collections.

    Texts of cached chunks are found in prompts, so a client gains without a change.
    """
    try:
        from samkv_integrations.server.run import Settings, run
    except ImportError as error:
        raise MissingExtra.of(error.name or "fastapi", "server") from error
    check_store_bits(store_bits)
    check_timeout(timeout)
    for option, number, least in (("--max-tokens", max_tokens, 1), ("--grace", grace, 0)):
        if number < least:
            raise InvalidOption(f"{option} {number}; give at least {least}")
    (chosen,), rule = methods_of([method], settings or []), eviction_of(eviction, eviction_budget)
    most_kv = None if max_kv is None else bytes_of("--max-kv", max_kv)
    limits = Limits(max_batch=max_batch, max_waiting=max_waiting, max_kv_bytes=most_kv)
    wanted = Settings(
        model_name=name or _name_of(model), most_tokens=max_tokens, timeout_s=timeout,
        logs_prompts=log_prompts, max_body_bytes=bytes_of("--max-body", max_body), grace_s=grace,
    )  # fmt: skip
    everybody = Tenant(namespace=namespace, collections=tuple(collection or ()))
    keys = ApiKeys(_keys_text(api_keys), everybody)
    if api_keys is not None and not keys:
        raise InvalidOption(f"--api-keys {api_keys} holds no key; give one a line, or leave it out")
    with listen_on(host, port, keys) as listening:  # before a model is loaded for nothing
        for tenant in keys.tenants:
            _require_own(folder, tenant)
        use_threads_for(model)
        scheduler = Scheduler(load_model(model, device=device, dtype=dtype), limits)
        tenancy = Tenancy(
            scheduler, folder, remote, method=chosen, eviction=rule, store_bits=store_bits
        )
        for tenant in keys.tenants:  # what is wrong with a folder is said now
            tenancy.engine(tenant)
        say = f"samkv: serving {wanted.model_name} on {{}}/v1"
        run(tenancy, keys, listening, wanted, lambda at: typer.echo(say.format(at), err=True))


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


def _require_own(folder: Path, tenant: Tenant) -> None:
    """See that its collections are there, and its own. Raises as their opening does."""
    names, database = tenant.collections, folder / "chroma"
    for name in names:
        open_collection(database, name, create=False)
    if names and (folder / "kv").is_dir():
        store = store_in(folder, tenant.namespace)
        try:
            require_own_records(store, database, names)
        except InvalidOption as error:
            raise InvalidOption(f"collections of namespace {tenant.namespace!r}: {error}") from None


def _name_of(model: str) -> str:
    """What clients call a model: a folder by its last name."""
    return Path(model).resolve().name if Path(model).is_dir() else model
