"""From the arguments of a connector to an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.cache.quantise import DEFAULT_STORE_BITS, check_store_bits
from samkv_integrations.engine.engine import Engine
from samkv_integrations.errors import InvalidOption
from samkv_integrations.eviction import get_eviction
from samkv_integrations.methods import get_method
from samkv_integrations.model.loading import load_model, load_tokenizer
from samkv_integrations.model.model import Model

# What is given -> the arguments that would have loaded it.
MADE_BY = {
    "engine": ("tokenizer_name", "model_kwargs", "tokenizer_kwargs"),
    "model": ("model_kwargs",),
    "tokenizer": ("tokenizer_kwargs",),
}


def engine_of(
    *,
    engine: Engine | None,
    model: Any,  # noqa: ANN401  (transformers' model)
    tokenizer: Any,  # noqa: ANN401
    model_name: str | None,
    tokenizer_name: str | None,
    device_map: str,
    dtype: str,
    model_kwargs: Mapping[str, Any],
    tokenizer_kwargs: Mapping[str, Any],
    kv_dir: str | Path | None,
    store_bits: int | None,
) -> Engine:
    """The engine that was given, or one on the model that was given or has to be loaded.

    store_bits: None for the engine's, which is the default of one that has to be made.

    Raises InvalidOption if an argument would be ignored.
    """
    given = {"engine": engine, "model": model, "tokenizer": tokenizer}
    loading = {
        "tokenizer_name": tokenizer_name,
        "model_kwargs": model_kwargs,
        "tokenizer_kwargs": tokenizer_kwargs,
    }
    for live, names in MADE_BY.items():
        for name in names:
            if given[live] is not None and loading[name]:
                raise InvalidOption(
                    f"{name} is for loading, and {live} was given loaded already; leave out either"
                )
    if engine is not None:
        for name in ("model", "tokenizer"):
            if given[name] is not None:
                raise InvalidOption(f"the engine that was given has its {name}; leave out {name}")
        _check_agreement(engine.model, model_name, device_map, dtype)
        folder = folder_of(engine)
        if kv_dir is not None and not (folder and Path(folder).resolve() == Path(kv_dir).resolve()):
            raise _contradiction("kv_dir", str(kv_dir), folder)
        if store_bits not in (None, engine.store_bits):
            raise _contradiction("store_bits", store_bits, engine.store_bits)
        return engine
    if tokenizer is None and tokenizer_name is not None:
        tokenizer = load_tokenizer(tokenizer_name, tokenizer_kwargs)
    if model is not None:
        if tokenizer is None:
            raise InvalidOption("model was given without its tokenizer; give tokenizer as well")
        label = model_name or getattr(model, "name_or_path", "") or type(model).__name__
        loaded = Model(model, tokenizer, label)
        _check_agreement(loaded, None, device_map, dtype)
    elif model_name is not None:
        loaded = load_model(
            model_name,
            device=device_map,
            dtype=dtype,
            tokenizer=tokenizer,
            model_kwargs=model_kwargs,
            tokenizer_kwargs=tokenizer_kwargs,
        )
    else:
        raise InvalidOption("give model_name (a hub id, a folder or 'builtin'), model, or engine")
    return Engine(
        loaded,
        None if kv_dir is None else ChunkStore(kv_dir),
        store_bits=DEFAULT_STORE_BITS if store_bits is None else store_bits,
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
    """Raises InvalidOption if a stop id is no token, or answers leave no room for a prompt.

    max_tokens: most tokens of an answer, under the name that the caller has for it.
    """
    model.end_ids(stop_ids)
    for name, number in max_tokens.items():
        if number >= context_window:
            raise InvalidOption(
                f"{name}={number} leaves no room for a prompt in the context window of "
                f"{model.name!r}, {context_window} tokens; give less"
            )
