"""From the arguments of a connector to an engine, and the engine as a part of a component."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.cache.memory import MemoryStore
from samkv_integrations.engine.engine import Engine
from samkv_integrations.errors import InvalidOption
from samkv_integrations.eviction import EVICTIONS, Eviction
from samkv_integrations.methods import DEFAULT_METHOD, METHODS
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
    store: MemoryStore | ChunkStore
    if folder is None:
        if source.max_bytes is not None:
            raise _no_folder(source.max_bytes)
        if source.kv_remote is not None:
            raise InvalidOption(
                f"kv_remote={source.kv_remote!r} needs a folder for what this machine has read of "
                "it; give kv_dir as well"
            )
        store = MemoryStore(namespace=namespace)
    elif not str(folder):
        raise InvalidOption("kv_dir=''; give a folder, or None to keep chunk caches in memory")
    else:
        store = ChunkStore(
            folder, namespace=namespace, max_bytes=source.max_bytes, remote=source.kv_remote
        )
    return Engine(
        _model_of(source), store, store_bits=source.store_bits,
        block_size="auto" if source.block_size is None else source.block_size,
    )  # fmt: skip


def _check_engine(engine: Engine, source: ModelSource) -> None:
    """Raises InvalidOption if the rest of ``source`` asks for another engine than the given one."""
    for name in ("model", "tokenizer"):
        if getattr(source, name) is not None:
            raise InvalidOption(f"the engine that was given has its {name}; leave out {name}")
    folder, kv_dir = folder_of(engine), source.kv_dir
    is_same = folder and kv_dir and Path(folder).resolve() == Path(kv_dir).resolve()
    _require_same(
        source,
        engine.model,
        model_name=engine.model.name,
        kv_dir=kv_dir if is_same else folder,
        kv_remote=remote_of(engine),
        namespace=engine.store.namespace,
        store_bits=engine.store_bits,
        block_size=engine.fingerprint.block_size,
    )
    if source.max_bytes is not None:  # no part of an engine: it is the store's from now on
        if not isinstance(engine.store, ChunkStore):
            raise _no_folder(source.max_bytes)
        before, quota = engine.store.index.budget()
        if before != source.max_bytes:
            engine.store.set_budget(source.max_bytes, quota)


def _require_same(source: ModelSource, model: Model, **actual: object) -> None:
    """Raises InvalidOption if an argument asks for something else than what was given."""
    device = model.device.type if source.device_map == model.device.type else str(model.device)
    for name, value in {**actual, "device_map": device, "dtype": model.dtype_name}.items():
        given = getattr(source, name)
        if given not in (None, value) and (given != "auto" or name in actual):
            raise InvalidOption(
                f"{name}={(str(given) if name == 'kv_dir' else given)!r}, but the model or engine "
                f"that was given has {value!r}; leave out either"
            )


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
        _require_same(source, model)
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


class EngineRef:
    """An engine as a private part of a component: copies share it, and pickles leave it behind.

    Frameworks copy their components deeply and send them to other processes; a loaded model is
    too big for either.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        self._engine = engine

    @classmethod
    def of(cls, llm: object | None, engine: Engine | None) -> EngineRef:
        """From the two arguments that a component takes, of which one must be given."""
        if (llm is None) == (engine is None):
            raise InvalidOption("give either llm (one of samkv-integrations) or engine")
        found = engine if llm is None else getattr(llm, "engine", None)
        if not isinstance(found, Engine):
            given = type(engine if llm is None else llm).__name__
            raise InvalidOption(
                f"{given} has no engine; give an LLM of samkv-integrations as llm, or an Engine"
            )
        return cls(found)

    @property
    def engine(self) -> Engine:
        """The engine. Raises InvalidOption after a pickle."""
        if self._engine is None:
            raise InvalidOption(
                "this component came from another process, and its engine stayed there; make it "
                "anew in this process, or use it in the one that it came from"
            )
        return self._engine

    def __deepcopy__(self, memo: dict[int, Any]) -> EngineRef:
        return self

    def __reduce__(self) -> tuple[type[EngineRef], tuple[()]]:
        return EngineRef, ()
