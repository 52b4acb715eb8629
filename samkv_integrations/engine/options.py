"""The options of an engine, and of one answer, each declared once; ``samkv.toml`` among them.

``samkv tune`` writes that file beside the chunk caches: what was measured to be enough, one entry a
model, by its name. An engine that opens the folder takes it where it was told nothing else.
"""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import Any, Literal, TypedDict, Unpack, get_args

import tomli_w

from samkv_integrations.cache.base import Store
from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.cache.files import read_small, write_file
from samkv_integrations.cache.quantise import DEFAULT_STORE_BITS, check_store_bits
from samkv_integrations.engine.chunk_prefix import PrefixPolicy
from samkv_integrations.errors import InvalidOption, StoreError, UnknownOption
from samkv_integrations.eviction import NO_EVICTION, Eviction, get_eviction, with_budget
from samkv_integrations.methods import DEFAULT_METHOD, Method, get_method
from samkv_integrations.methods.base import with_option
from samkv_integrations.model.model import Model
from samkv_integrations.model.sampling import (
    OPTIONS,
    Sampling,
    SamplingOptions,
    check_json_schema,
)
from samkv_integrations.prompt.resolve import OnMiss
from samkv_integrations.prompt.text import check_text


class EngineOptions(TypedDict, total=False):
    """What an engine can be told beside its model and its store; see `Engine`."""

    method: str | Method | None
    eviction: str | Eviction | None
    block_size: int | Literal["auto"]
    prefix: PrefixPolicy
    prefix_text: str
    store_bits: int | None
    prefix_bytes: int
    exact_beginnings: bool


class AnswerOptions(SamplingOptions, total=False):
    """Options of `Engine.generate` and `Engine.stream`: those of sampling, and these.

    method, eviction: in place of the engine's for this answer; ``eviction="none"`` for none.
    context_window: tokens that prompt and answer may have together, if fewer than the model's.
    stop, stop_ids: strings and token ids that end the answer and are no part of it.
    json_schema: a JSON schema, which the answer keeps to; see `JsonConstraint`. One that reaches
        max_new_tokens is cut, and its finish_reason is ``length``. Needs the extra ``structured``.
    timeout: seconds after which an answer that is not complete ends with TimedOut; None for no end
        of patience. It counts from the call, waiting for other answers included.
    on_miss: what to do for a chunk without a usable cache: ``compute`` (as a chunk, and keep it;
        ``auto`` only where that does not take longer than full prefill, ``recompute`` never),
        ``text`` (compute it with the rest of the prompt, keep nothing), ``error``. What turns out
        damaged only while it is read is computed as ``text`` by both of them.
    """

    method: str | Method | None
    eviction: str | Eviction | None
    context_window: int | None
    stop: Sequence[str]
    stop_ids: Collection[int]
    json_schema: Mapping[str, Any] | None
    timeout: float | None
    on_miss: OnMiss


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """`AnswerOptions`, checked as far as they can be without a model. None is the engine's own."""

    sampling: Sampling
    method: Method | None = None
    eviction: str | Eviction | None = None
    context_window: int | None = None
    stop: Sequence[str] = ()
    stop_ids: Collection[int] = ()
    json_schema: Mapping[str, Any] | None = None
    timeout: float | None = None
    on_miss: OnMiss = "compute"

    @classmethod
    def of(cls, **options: Unpack[AnswerOptions]) -> AnswerSettings:
        """From keyword arguments. Raises InvalidOption or UnknownOption for what is wrong."""
        given: dict[str, Any] = {}
        sampling: dict[str, Any] = {}
        for name, value in options.items():
            if name not in AnswerOptions.__annotations__:
                raise UnknownOption.among(
                    "option of an answer", name, AnswerOptions.__annotations__
                )
            (sampling if name in OPTIONS else given)[name] = value
        if given.get("method") is not None:
            given["method"] = get_method(given["method"])
        return cls(sampling=Sampling(**sampling), **given)

    def __post_init__(self) -> None:
        get_eviction(self.eviction)
        window = self.context_window
        if window is not None and (type(window) is not int or window < 1):
            raise InvalidOption(
                f"context_window={window!r}; it must be a whole number of at least 1"
            )
        is_list = isinstance(self.stop, Collection) and not isinstance(self.stop, str)
        # an empty one would end every answer
        for text in self.stop if is_list else ("",):
            if not isinstance(text, str) or not text:
                raise InvalidOption(f"stop={self.stop!r}; it must be a list of non-empty strings")
        check_timeout(self.timeout)
        if self.json_schema is not None:
            check_json_schema(self.json_schema)
            if self.stop:
                raise InvalidOption(
                    f"stop={self.stop!r} with json_schema: a stop string could cut the JSON, which "
                    "ends by itself; leave out either"
                )
        check_on_miss(self.on_miss)


def check_given_bits(store_bits: int | None) -> None:
    """Raises InvalidOption if caches cannot have so many bits; None is the engine's choice."""
    if store_bits is not None:
        check_store_bits(store_bits)


def check_timeout(timeout: Any) -> None:  # noqa: ANN401
    """Raises InvalidOption if this is no time that one could wait."""
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and 0 < timeout <= TIMEOUT_MAX):
        raise InvalidOption(
            f"timeout={timeout!r}; it must be above 0 and at most {TIMEOUT_MAX:.0f} seconds, or "
            "None for no end"
        )


def check_tokens(name: str, ids: Sequence[int], model: Model) -> None:
    """Raises InvalidOption if one of ``ids`` is no token of the model."""
    n_known = model.config.vocab_size
    if unknown := [token for token in ids if not 0 <= token < n_known]:
        raise InvalidOption(
            f"{name} holds {unknown[0]}, which is no token; {model.name!r} has {n_known}, counted "
            "from 0"
        )


def check_parts(model: object, store: object, prefix: object, prefix_text: object) -> None:
    """Raises InvalidOption for what is nearly an argument of an engine."""
    if not isinstance(model, Model):
        raise InvalidOption(
            f"model={model!r} is no Model; Engine.from_pretrained takes a name or a folder, and "
            "Model(model, tokenizer, name) what transformers has loaded"
        )
    if isinstance(store, str | os.PathLike):
        raise InvalidOption(f"store={store!r} is no store; give ChunkStore({str(store)!r})")
    is_file = isinstance(prefix, os.PathLike) or str(prefix).endswith(".safetensors")
    if prefix == "learned" or is_file:
        raise InvalidOption(
            f"prefix={str(prefix)!r}: learned prefixes were removed; give prefix='documents', and "
            "ingest again"
        )
    if prefix not in get_args(PrefixPolicy):
        raise InvalidOption(f"prefix={prefix!r}; allowed: {', '.join(get_args(PrefixPolicy))}")
    check_text("prefix_text", prefix_text)


def check_on_miss(on_miss: str) -> None:
    """Raises InvalidOption if ``on_miss`` is nothing that can be done for a missed chunk."""
    if on_miss not in get_args(OnMiss):
        raise InvalidOption(f"on_miss={on_miss!r}; allowed: {', '.join(get_args(OnMiss))}")


# -- samkv.toml -------------------------------------------------------------------------------

TUNED_FILE = "samkv.toml"

_HEADER = """\
# The settings that 'samkv tune' found enough for the models that are named, on these chunk caches.
# Whoever opens this folder with such a model takes them, unless told otherwise: docs/tune.md.
"""

_LOG = logging.getLogger(__name__)

Scalar = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class TunedSetting:
    """One entry. Raises UnknownOption or InvalidOption for what an engine could not do.

    model: its name, as the engine was given it. method, set: as ``--method`` and ``--set``.
    eviction, eviction_budget: what a method's answers go on with; ``"none"`` for everything, and
        None for the rule's usual budget.
    store_bits: of the caches that it was measured on. measured: what it was measured with, for
        people.
    """

    model: str
    method: str
    set: tuple[str, ...] = ()
    eviction: str = NO_EVICTION
    eviction_budget: float | None = None
    store_bits: int = DEFAULT_STORE_BITS
    measured: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_store_bits(self.store_bits)
        self.to_method()  # raises
        for name, value in self.measured.items():
            if not isinstance(value, Scalar):
                raise InvalidOption(
                    f"measured.{name} is {value!r}; it must be a text, a number, true or false"
                )

    def to_method(self) -> Method:
        """The method with its options, and with the eviction as its own rule."""
        method = get_method(self.method)
        for setting in self.set:
            method = with_option(method, setting)
        rule = get_eviction(self.eviction)
        if self.eviction_budget is not None:
            if rule is None:
                raise InvalidOption("eviction_budget without an eviction; leave it out")
            rule = with_budget(rule, self.eviction_budget)
        return replace(method, eviction=rule)

    @property
    def line(self) -> str:
        """The setting in the words of the command line."""
        words = [f"--method {self.method}", *(f"--set {setting}" for setting in self.set)]
        words += [f"--eviction {self.eviction}"]
        if self.eviction_budget is not None:
            words += [f"--eviction-budget {self.eviction_budget:g}"]
        return " ".join(words)


def choices_of(
    model: Model,
    store: Store,
    method: str | Method | None,
    eviction: str | Eviction | None,
    store_bits: int | None,
) -> tuple[Method, int, TunedSetting | None]:
    """The method and the bits of an engine, and the tuned entry that the method is from, if any.

    What was given, else what the folder of the caches says for the model, else the defaults.

    Raises:
        UnknownOption, InvalidOption: what was given is wrong, or the file is.
    """
    get_eviction(eviction)
    entry = None
    if method is None or store_bits is None:
        entry = tuned_setting(model, store)
    bits = _bits(model, store, entry) if store_bits is None else store_bits
    if method is not None or entry is None:
        chosen = get_method(DEFAULT_METHOD if method is None else method)
        return chosen, bits, None
    if entry.store_bits != bits:  # what was enough on finer caches may not be on these
        _LOG.warning(
            "%s: the setting for %r was measured on caches of %d bits and is not taken with %d; "
            "ingest again with --store-bits %d, or tune again",
            TUNED_FILE, model.name, entry.store_bits, bits, entry.store_bits,
        )  # fmt: skip
        return get_method(DEFAULT_METHOD), bits, None
    _LOG.info("%s: %r answers with %s", TUNED_FILE, model.name, entry.line)
    return entry.to_method(), bits, entry


def tuned_setting(model: Model, store: Store) -> TunedSetting | None:
    """The entry for the model in the folder of the store; None for a store without such a file.

    Raises InvalidOption as `read_tuned` does.
    """
    return read_tuned(store.path).get(model.name) if isinstance(store, ChunkStore) else None


def _bits(model: Model, store: Store, entry: TunedSetting | None) -> int:
    """Those of the entry, unless the caches that are there have others: they would all be missed.

    Caches of other bits are made by whoever says so, ``samkv ingest --store-bits``.
    """
    if entry is None or entry.store_bits == DEFAULT_STORE_BITS:
        return DEFAULT_STORE_BITS
    held: set[int] = set()
    with suppress(StoreError):
        mine = (model.identity.weights, model.dtype_name)
        held = {f.store_bits for f in store.fingerprints() if (f.weights, f.dtype) == mine}
    return entry.store_bits if not held or entry.store_bits in held else DEFAULT_STORE_BITS


def read_tuned(folder: str | os.PathLike[str]) -> dict[str, TunedSetting]:
    """The entries in a folder of chunk caches, by model; none without the file.

    Raises InvalidOption, with file, key and what is allowed, if it is broken.
    """
    file = Path(folder) / TUNED_FILE
    try:
        found = tomllib.loads(read_small(file).decode("utf-8-sig"))
        for name in found.keys() - {"models"}:
            raise ValueError(f"key {name!r}; allowed: models")
        models = found.get("models", {})
        if not isinstance(models, dict):
            raise ValueError(f"key 'models' is {models!r}; it must hold a table for each model")
        return {name: _entry(name, entry) for name, entry in models.items()}
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(f"{file} cannot be read ({error}); mend or delete it") from error
    except (ValueError, RecursionError) as error:
        raise InvalidOption(
            f"{file}: {error}; mend or delete it; without it, 'samkv tune' writes a new one"
        ) from error


_KEYS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "method": ((str,), "a text"),
    "set": ((list,), "a list of 'NAME=VALUE'"),
    "eviction": ((str,), "a text"),
    "eviction_budget": ((float, int), "a number"),
    "store_bits": ((int,), "a whole number"),
    "measured": ((dict,), "a table"),
}


def _entry(model: str, found: object) -> TunedSetting:
    if not isinstance(found, dict):
        raise ValueError(f"key models.{model!r} is {found!r}; it must be a table")
    for key, value in found.items():
        if key not in _KEYS:
            raise ValueError(f"key models.{model!r}.{key}; allowed: {', '.join(_KEYS)}")
        types, words = _KEYS[key]
        is_list = isinstance(value, list)
        if type(value) not in types or (is_list and not all(type(each) is str for each in value)):
            raise ValueError(f"key models.{model!r}.{key} is {value!r}; it must be {words}")
    if "method" not in found:
        raise ValueError(f"key models.{model!r}.method is missing")
    try:
        return TunedSetting(model=model, **{**found, "set": tuple(found.get("set", ()))})
    except (UnknownOption, InvalidOption) as error:
        raise ValueError(f"key models.{model!r}: {error}") from error


def write_tuned(folder: str | os.PathLike[str], setting: TunedSetting) -> Path:
    """Write an entry, in place of the one that the model had; returns the file.

    Entries of other models stay as they are.

    Raises InvalidOption if the file that is there is broken, or cannot be written.
    """
    file = Path(folder) / TUNED_FILE
    entries = {**read_tuned(folder), setting.model: setting}
    tables = {}
    for model, entry in sorted(entries.items()):
        values = {**asdict(entry), "set": list(entry.set), "measured": dict(entry.measured)}
        del values["model"]
        tables[model] = {name: each for name, each in values.items() if each is not None}
    try:
        write_file(file, [f"{_HEADER}\n{tomli_w.dumps({'models': tables})}".encode()])
    except (OSError, UnicodeEncodeError) as error:
        raise InvalidOption(f"{file} cannot be written ({error}); allow access there") from error
    return file
