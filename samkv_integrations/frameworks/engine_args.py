"""From the arguments of a connector to an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.cache.memory import MemoryStore
from samkv_integrations.cache.quantise import check_store_bits
from samkv_integrations.engine.engine import Engine
from samkv_integrations.errors import InvalidOption
from samkv_integrations.eviction import EVICTIONS, Eviction, get_eviction
from samkv_integrations.methods import DEFAULT_METHOD, METHODS, get_method
from samkv_integrations.model.loading import load_model, load_tokenizer
from samkv_integrations.model.model import Model

MADE_BY = {
    "engine": ("tokenizer_name", "model_kwargs", "tokenizer_kwargs"),
    "model": ("model_kwargs",),
    "tokenizer": ("tokenizer_kwargs",),
}
"""What is given live -> the arguments that would have loaded it."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where an engine comes from: it is given, or its model is, or its model has to be loaded.

    model: of transformers, and then ``tokenizer`` or ``tokenizer_name`` is needed.
    model_name: what to load, or the label of ``model``.
    kv_dir: folder of the chunk caches; None keeps them in memory.
    kv_remote: where machines share their caches, see `ChunkStore`; ``kv_dir`` is its local tier.
    namespace: of the chunk caches; None for the engine's, which is "" if it has to be made.
    store_bits: None for the engine's, see `Engine` for one that has to be made.
    max_bytes: what the chunk caches of ``kv_dir`` may take on disk; None for what was said before.
    block_size: tokens a block; None for that of the engine, or of what the store holds.
    """

    engine: Engine | None = None
    model: Any = None
    tokenizer: Any = None
    model_name: str | None = None
    tokenizer_name: str | None = None
    device_map: str = "auto"
    dtype: str = "auto"
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_kwargs: Mapping[str, Any] = field(default_factory=dict)
    kv_dir: str | Path | None = None
    kv_remote: str | None = None
    namespace: str | None = None
    store_bits: int | None = None
    max_bytes: int | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        for live, names in MADE_BY.items():
            for name in names:
                if getattr(self, live) is not None and getattr(self, name):
                    raise InvalidOption(
                        f"{name} is for loading, and {live} was given loaded already; leave out "
                        "either"
                    )


def engine_of(source: ModelSource) -> Engine:
    """The engine that was given, or one on the model that was given or has to be loaded.

    The store is opened first: a folder that cannot be one is found before a model is loaded.

    Raises InvalidOption if an argument would be ignored.
    """
    if source.engine is not None:
        _check_engine(source.engine, source)
        return source.engine
    if source.model is None and source.model_name is None:
        raise InvalidOption(
            "give model_name (a hub id, a folder, a GGUF file, 'smollm2' or 'builtin'), model, or "
            "engine"
        )
    namespace, folder = source.namespace or "", source.kv_dir
    if folder is not None and not str(folder):
        raise InvalidOption("kv_dir=''; give a folder, or None to keep chunk caches in memory")
    if folder is None and source.max_bytes is not None:
        raise _no_folder(source.max_bytes)
    if folder is None and source.kv_remote is not None:
        raise InvalidOption(
            f"kv_remote={source.kv_remote!r} needs a folder for what this machine has read of it; "
            "give kv_dir as well"
        )
    store = (
        MemoryStore(namespace=namespace)
        if folder is None
        else ChunkStore(
            folder, namespace=namespace, max_bytes=source.max_bytes, remote=source.kv_remote
        )
    )
    size = source.block_size
    return Engine(
        _model_of(source), store, store_bits=source.store_bits,
        block_size="auto" if size is None else size,
    )  # fmt: skip


def _check_engine(engine: Engine, source: ModelSource) -> None:
    """Raises InvalidOption if the rest of ``source`` asks for another engine than the given one."""
    for name in ("model", "tokenizer"):
        if getattr(source, name) is not None:
            raise InvalidOption(f"the engine that was given has its {name}; leave out {name}")
    _check_agreement(engine.model, source.model_name, source.device_map, source.dtype)
    folder, kv_dir = folder_of(engine), source.kv_dir
    if kv_dir is not None and not (folder and Path(folder).resolve() == Path(kv_dir).resolve()):
        raise _contradiction("kv_dir", str(kv_dir), folder)
    if source.kv_remote not in (None, remote_of(engine)):
        raise _contradiction("kv_remote", source.kv_remote, remote_of(engine))
    if source.namespace not in (None, engine.store.namespace):
        raise _contradiction("namespace", source.namespace, engine.store.namespace)
    if source.store_bits not in (None, engine.store_bits):
        raise _contradiction("store_bits", source.store_bits, engine.store_bits)
    if source.block_size not in (None, engine.fingerprint.block_size):
        raise _contradiction("block_size", source.block_size, engine.fingerprint.block_size)
    if source.max_bytes is not None:
        _set_budget(engine, source.max_bytes)


def _set_budget(engine: Engine, max_bytes: int) -> None:
    """A budget is no part of an engine, but can be given with one: it is the store's from now."""
    if not isinstance(engine.store, ChunkStore):
        raise _no_folder(max_bytes)
    before, quota = engine.store.index.budget()
    if before != max_bytes:
        engine.store.set_budget(max_bytes, quota)


def _no_folder(max_bytes: int) -> InvalidOption:
    return InvalidOption(
        f"max_bytes={max_bytes} limits a folder of chunk caches, and these are kept in memory; "
        "give kv_dir as well"
    )


def _model_of(source: ModelSource) -> Model:
    tokenizer = source.tokenizer
    if tokenizer is None and source.tokenizer_name is not None:
        tokenizer = load_tokenizer(source.tokenizer_name, source.tokenizer_kwargs)
    if source.model is not None:
        if tokenizer is None:
            raise InvalidOption("model was given without its tokenizer; give tokenizer as well")
        saved_as = getattr(source.model, "name_or_path", "")
        label = source.model_name or saved_as or type(source.model).__name__
        model = Model(source.model, tokenizer, label)
        _check_agreement(model, None, source.device_map, source.dtype)
        return model
    assert source.model_name is not None  # `engine_of` has looked
    return load_model(
        source.model_name,
        device=source.device_map,
        dtype=source.dtype,
        tokenizer=tokenizer,
        model_kwargs=source.model_kwargs,
        tokenizer_kwargs=source.tokenizer_kwargs,
    )


def _check_agreement(model: Model, model_name: str | None, device_map: str, dtype: str) -> None:
    """Raises InvalidOption if the arguments ask for another model than the one that was given."""
    for name, value, allowed in (
        ("model_name", model_name, (None, model.name)),
        ("device_map", device_map, ("auto", model.device.type, str(model.device))),
        ("dtype", dtype, ("auto", model.dtype_name)),
    ):
        if value not in allowed:
            raise _contradiction(name, value, allowed[-1])


def _contradiction(name: str, value: object, actual: object) -> InvalidOption:
    return InvalidOption(
        f"{name}={value!r}, but the model or engine that was given has {actual!r}; leave out either"
    )


def folder_of(engine: Engine) -> str | None:
    """Where the engine keeps its chunk caches; None for memory."""
    return str(engine.store.path) if isinstance(engine.store, ChunkStore) else None


def remote_of(engine: Engine) -> str | None:
    """Where the engine shares its chunk caches with other machines; None for nowhere."""
    shared = engine.store.shared if isinstance(engine.store, ChunkStore) else None
    return shared.url if shared else None


def own_choices(engine: Engine) -> tuple[str | None, str | None]:
    """The names of the engine's method and eviction.

    None for the default, and for what was made or configured otherwise and has no name.
    """
    method, rule = engine.method, engine.eviction
    has_name = method.name != DEFAULT_METHOD and METHODS.get(method.name) == method
    if isinstance(rule, Eviction):
        rule = rule.name if EVICTIONS.get(rule.name) == rule else None
    return (method.name if has_name else None), rule


def check_choices(method: str | None, eviction: str | None, store_bits: int | None) -> None:
    """Raises if one is no choice that there is; None for the engine's.

    Raises UnknownOption (method, eviction) or InvalidOption (store_bits).
    """
    if method is not None:
        get_method(method)
    get_eviction(eviction)
    if store_bits is not None:
        check_store_bits(store_bits)


def check_fits(
    model: Model, context_window: int, stop_ids: Iterable[int], **max_tokens: int
) -> None:
    """Raises InvalidOption for a wrong window or stop id, or answers that leave prompts no room.

    max_tokens: most tokens of an answer, under the name that the caller has for it.
    """
    if not 0 < context_window <= model.context_window:
        raise InvalidOption(
            f"context_window={context_window}; {model.name!r} has {model.context_window}, give 1 "
            "to that, or None for all of it"
        )
    model.end_ids(stop_ids)
    for name, number in max_tokens.items():
        if number >= context_window:
            raise InvalidOption(
                f"{name}={number} leaves no room for a prompt in the context window of "
                f"{model.name!r}, {context_window} tokens; give less"
            )
