"""Builds an engine from an LLM's arguments, and keeps an engine inside a framework's component."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec

from pydantic import AfterValidator, ConfigDict, Field, PrivateAttr
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from samkv_integrations.engine import Engine
from samkv_integrations.errors import Given, InvalidOption
from samkv_integrations.frameworks.fields import (
    OWN_ENGINE_OPTIONS,
    Arguments,
    EngineFields,
    unknown_option,
)
from samkv_integrations.option import bytes_of, check_options, declared
from samkv_integrations.options import EngineOptions, LlamaCppOptions, ModelOptions
from samkv_integrations.runtimes import load_runtime
from samkv_integrations.runtimes.base import Runtime
from samkv_integrations.store.disk import ChunkStore
from samkv_integrations.store.memory import MemoryStore

_OF_LOADING = ("model_kwargs", "n_threads", *declared(LlamaCppOptions))
MADE_BY = {
    "engine": ("tokenizer_name", "tokenizer_kwargs", "runtime", *_OF_LOADING),
    "model": _OF_LOADING,
    "tokenizer": ("tokenizer_kwargs",),
}
"""Loaded object -> arguments for loading it, which have no effect together with the object."""


def _checked_engine(value: object) -> object:
    if value is not None and not isinstance(value, Engine):
        raise PydanticCustomError("is_instance_of", "Input should be an instance of Engine")
    return value


if TYPE_CHECKING:
    AnEngine = Engine
else:
    AnEngine = Annotated[Any, AfterValidator(_checked_engine)]
"""Type of a pydantic field that holds an `Engine`."""


class ModelSource(Arguments, EngineFields):
    """The arguments that an engine is built from: a model, loaded or to be loaded, and a store.

    engine: an existing engine, in place of a new one.
    model, tokenizer: loaded objects of transformers. ``model`` needs ``tokenizer`` or
        ``tokenizer_name``, and ``model_name`` is its label.
    block_size: tokens of a block; None for the engine's, or that of the caches in the store.
    """

    model_config = ConfigDict(frozen=True)

    engine: AnEngine | None = None
    model: Any = None
    tokenizer: Any = None
    block_size: int | Literal["auto"] | None = None


def engine_of(source: ModelSource) -> Engine:
    """The engine of ``source``, or a new one; loads the model unless ``source`` has a loaded one.

    The store is opened first, so that a wrong folder raises before a model is loaded.

    Raises InvalidOption if an argument would be ignored, MissingExtra if no runtime is installed.
    """
    for loaded, names in MADE_BY.items():
        for name in names:
            if getattr(source, loaded) is not None and getattr(source, name) not in (None, {}):
                raise InvalidOption(
                    f"{name} is for loading, and a loaded {loaded} was given; leave out one of them"
                )
    if source.engine is not None:
        _check_engine(source.engine, source)
        return source.engine
    if source.model is None and not source.model_name:
        raise InvalidOption(
            "give model_name (a hub id, a folder, a GGUF file, 'smollm2' or 'builtin'), model, or "
            "engine"
        )
    given = {name: getattr(source, name) for name in (*OWN_ENGINE_OPTIONS, "block_size")}
    options: Any = {name: value for name, value in given.items() if value is not None}
    check_options(EngineOptions, options)
    namespace, folder = source.namespace or "", source.kv_dir
    store: MemoryStore | ChunkStore
    if folder is None:
        if source.max_bytes is not None:
            bytes_of("max_bytes", source.max_bytes)  # raises
        _require_no("max_bytes", "kv_remote", "hot_bytes", of=source)
        store = MemoryStore(namespace=namespace)
    elif not str(folder):
        raise InvalidOption("kv_dir=''; give a folder, or None to keep chunk caches in memory")
    else:
        store = ChunkStore(
            folder, namespace=namespace, max_bytes=source.max_bytes, remote=source.kv_remote
        )
    return Engine(_model_of(source), store, **options)


def facts_of(engine: Engine) -> dict[str, Any]:
    """The settings of an engine, under the names of an LLM's fields: field -> value."""
    store = engine.store
    return {
        "model_name": engine.model.name,
        "kv_dir": str(store.path) if store.path else None,
        "kv_remote": store.remote_url,
        "namespace": store.namespace,
        **{name: getattr(engine, name) for name in OWN_ENGINE_OPTIONS},
    }


def _check_engine(engine: Engine, source: ModelSource) -> None:
    """Raises InvalidOption if another argument in ``source`` contradicts the given engine."""
    for name in ("model", "tokenizer"):
        if getattr(source, name) is not None:
            raise InvalidOption(f"the engine that was given has its {name}; leave out {name}")
    facts = facts_of(engine)
    if source.block_size != "auto":
        facts["block_size"] = engine.fingerprint.block_size
    folder, kv_dir = facts["kv_dir"], source.kv_dir
    if folder and kv_dir and Path(folder).resolve() == Path(kv_dir).resolve():
        facts["kv_dir"] = kv_dir
    _require_same(source, engine.model, facts)
    if engine.store.path is None:
        _require_no("max_bytes", of=source)
    elif source.max_bytes is not None:  # max_bytes is a limit of the store
        before, quota = engine.store.index.budget()
        if before != bytes_of("max_bytes", source.max_bytes):
            engine.store.set_budget(source.max_bytes, quota)


def _require_same(source: ModelSource, model: Runtime, facts: dict[str, Any]) -> None:
    """Raises InvalidOption if an argument contradicts the loaded model or engine."""
    kind = model.device_name.partition(":")[0]
    device = kind if source.device_map == kind else model.device_name
    of_model = {"device_map": device, "dtype": model.dtype_name}
    for name, value in {**facts, **of_model}.items():
        given = getattr(source, name)
        is_unset = given in (None, value) or (name == "model_name" and not given)
        if not is_unset and (given != "auto" or name in facts):
            raise InvalidOption(
                Given(name, (str(given) if name == "kv_dir" else given)),
                f", but the model or engine that was given has {value!r}; leave out either",
            )


def _require_no(*names: str, of: ModelSource) -> None:
    """Raises InvalidOption if one of these arguments is given though caches are in memory."""
    for name in names:
        if value := getattr(of, name):
            raise InvalidOption(
                Given(name, value),
                " is for chunk caches in a folder, and these are in memory; give kv_dir as well",
            )


def _model_of(source: ModelSource) -> Runtime:
    if source.model is not None:
        return _loaded_model(source)
    names = (*declared(ModelOptions), *declared(LlamaCppOptions))
    options = {name: getattr(source, name) for name in names}
    name, runtime, device = (options.pop(n) for n in ("model_name", "runtime", "device_map"))
    return load_runtime(
        name, runtime, device=device or "cpu", tokenizer=source.tokenizer, **options
    )  # fmt: skip


def _loaded_model(source: ModelSource) -> Runtime:
    """The runtime of a model and a tokenizer that transformers has loaded."""
    if source.runtime not in (None, "transformers"):
        raise InvalidOption(
            Given("runtime", source.runtime),
            " loads a GGUF file by itself, and a model of transformers was given; give model_name, "
            "or leave runtime out",
        )
    # the import takes seconds, and a program that only imports a connector should not wait
    from samkv_integrations.runtimes.transformers import Model, load_tokenizer

    tokenizer = source.tokenizer
    if tokenizer is None and source.tokenizer_name is not None:
        tokenizer = load_tokenizer(source.tokenizer_name, source.tokenizer_kwargs)
    if tokenizer is None:
        raise InvalidOption("model was given without its tokenizer; give tokenizer as well")
    saved_as = getattr(source.model, "name_or_path", "")
    label = source.model_name or saved_as or type(source.model).__name__
    given = Model(source.model, tokenizer, label)
    _require_same(source, given, {})
    return given


class EngineRef:
    """An engine as a private part of a component: copies share it, pickles omit it.

    Frameworks deep-copy components and send them to other processes. A loaded model is too large
    for either.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        self._engine = engine

    @classmethod
    def of(cls, llm: object | None, engine: Engine | None) -> EngineRef:
        """From the arguments of a component. Raises InvalidOption unless exactly one is given."""
        if (llm is None) == (engine is None):
            raise InvalidOption("give either llm (one of samkv-integrations) or engine")
        found: object = engine if llm is None else getattr(llm, "engine", None)
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
                "this component came out of a pickle, which holds no engine; create it again, or "
                "use the one that was pickled, in its process"
            )
        return self._engine

    def __deepcopy__(self, memo: dict[int, Any]) -> EngineRef:
        return self

    def __reduce__(self) -> tuple[type[EngineRef], tuple[()]]:
        return EngineRef, ()


class WithEngine(Arguments):
    """A component of a framework that takes ``llm`` or ``engine``, and keeps an `EngineRef`.

    llm, engine: one of the two; both are None once the component has the engine.
    """

    llm: SkipJsonSchema[Any] = Field(default=None, exclude=True, repr=False)
    engine: SkipJsonSchema[Any] = Field(default=None, exclude=True, repr=False)

    _engine: EngineRef = PrivateAttr(default_factory=EngineRef)

    def _use(self) -> None:
        self._engine = EngineRef.of(self.llm, self.engine)
        self.llm = self.engine = None


_Given = ParamSpec("_Given")


def known_arguments(init: Callable[_Given, None]) -> Callable[_Given, None]:
    """The constructor; for an unknown argument it raises UnknownOption with a suggestion."""
    known = [*inspect.signature(init).parameters][1:]

    @wraps(init)
    def checked(*args: _Given.args, **kwargs: _Given.kwargs) -> None:
        for name in kwargs.keys() - set(known):
            raise unknown_option(f"argument of {type(args[0]).__name__}", name, known, {})
        init(*args, **kwargs)

    return checked
