"""``samkv.toml``: what was measured to be enough for a model, beside the chunk caches.

One entry a model, by its name. ``samkv tune`` writes it, and an engine that opens the folder takes
it where it was told nothing else.
"""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import tomli_w

from samkv_integrations.cache.base import Store
from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.cache.quantise import DEFAULT_STORE_BITS, check_store_bits
from samkv_integrations.errors import (
    InvalidOption,
    StoreError,
    UnknownOption,
)
from samkv_integrations.eviction import NO_EVICTION, Eviction, get_eviction, with_budget
from samkv_integrations.methods import DEFAULT_METHOD, Method, get_method
from samkv_integrations.methods.base import with_option
from samkv_integrations.model.model import Model

FILE = "samkv.toml"

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


@dataclass(frozen=True, kw_only=True)
class EngineChoices:
    """What an engine answers with. tuned: the entry that any of it is from, None for none."""

    method: Method
    store_bits: int
    tuned: TunedSetting | None = None


def choices_of(
    model: Model,
    store: Store,
    method: str | Method | None,
    eviction: str | Eviction | None,
    store_bits: int | None,
) -> EngineChoices:
    """What was given, else what the folder of the caches says for the model, else the defaults.

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
        return EngineChoices(method=chosen, store_bits=bits)
    if entry.store_bits != bits:  # what was enough on finer caches may not be on these
        _LOG.warning(
            "%s: the setting for %r was measured on caches of %d bits and is not taken with %d; "
            "ingest again with --store-bits %d, or tune again",
            FILE, model.name, entry.store_bits, bits, entry.store_bits,
        )  # fmt: skip
        return EngineChoices(method=get_method(DEFAULT_METHOD), store_bits=bits)
    _LOG.info("%s: %r answers with %s", FILE, model.name, entry.line)
    return EngineChoices(method=entry.to_method(), store_bits=bits, tuned=entry)


def tuned_setting(model: Model, store: Store) -> TunedSetting | None:
    """The entry for the model in the folder of the store; None for a store without such a file.

    Raises InvalidOption if the file is broken; what it says of other models may be.
    """
    if not isinstance(store, ChunkStore):
        return None
    with _explained(store.path / FILE):
        found = _tables(store.path / FILE)
        return _entry(model.name, found[model.name]) if model.name in found else None


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


def read(folder: str | os.PathLike[str]) -> dict[str, TunedSetting]:
    """The entries in a folder of chunk caches, by model; none without the file.

    Raises InvalidOption, with file, key and what is allowed, if it is broken.
    """
    file = Path(folder) / FILE
    with _explained(file):
        return {name: _entry(name, found) for name, found in _tables(file).items()}


def write(folder: str | os.PathLike[str], setting: TunedSetting) -> Path:
    """Write an entry, in place of the one that the model had; returns the file.

    Entries of other models stay as they are.

    Raises InvalidOption if the file that is there is no TOML, or cannot be written.
    """
    file = Path(folder) / FILE
    with _explained(file):
        tables = {**_tables(file), setting.model: _table(setting)}
    text = f"{_HEADER}\n{tomli_w.dumps({'models': dict(sorted(tables.items()))})}"
    made = file.with_name(f".{FILE}.{os.getpid()}")
    try:
        made.write_text(text, encoding="utf-8")
        made.replace(file)
    except (OSError, UnicodeEncodeError) as error:
        made.unlink(missing_ok=True)
        raise InvalidOption(f"{file} cannot be written ({error}); allow access there") from error
    return file


class _Broken(ValueError):
    """What is wrong with a file, and at which key."""


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    """What is wrong with a file, as InvalidOption."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(f"{file} cannot be read ({error}); mend or delete it") from error
    except (tomllib.TOMLDecodeError, RecursionError, _Broken) as error:
        raise InvalidOption(
            f"{file}: {error}; mend or delete it; without it, 'samkv tune' writes a new one"
        ) from error


def _tables(file: Path) -> Mapping[str, Any]:
    """The table of tables ``models``, which is all that there may be; empty without the file."""
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return {}
    for name in found:
        if name != "models":
            raise _Broken(f"key {name!r}; allowed: models")
    models = found.get("models", {})
    if not isinstance(models, dict):
        raise _Broken(f"key 'models' is {models!r}; it must hold a table for each model")
    return models


_KEYS: Mapping[str, tuple[type, ...]] = {
    "method": (str,),
    "set": (list,),
    "eviction": (str,),
    "eviction_budget": (float, int),
    "store_bits": (int,),
    "measured": (dict,),
}
_WORDS: Mapping[type, str] = {
    str: "a text", list: "a list of 'NAME=VALUE'", float: "a number", int: "a whole number",
    dict: "a table",
}  # fmt: skip


def _entry(name: str, found: object) -> TunedSetting:
    if not isinstance(found, dict):
        raise _Broken(f"key models.{name!r} is {found!r}; it must be a table")
    for key, value in found.items():
        at = f"key models.{name!r}.{key}"
        if key not in _KEYS:
            raise _Broken(f"{at}; allowed: {', '.join(_KEYS)}")
        if type(value) not in _KEYS[key]:
            raise _Broken(f"{at} is {value!r}; it must be {_WORDS[_KEYS[key][0]]}")
    options = found.get("set", [])
    if not all(isinstance(option, str) for option in options):
        raise _Broken(f"key models.{name!r}.set is {options!r}; it must be {_WORDS[list]}")
    if "method" not in found:
        raise _Broken(f"key models.{name!r}.method is missing")
    try:
        return TunedSetting(model=name, **{**found, "set": tuple(options)})
    except (UnknownOption, InvalidOption) as error:
        raise _Broken(f"key models.{name!r}: {error}") from error


def _table(entry: TunedSetting) -> dict[str, Any]:
    """An entry as what `tomllib` would read of it; TOML has no word for None."""
    values = {each.name: getattr(entry, each.name) for each in fields(entry)}
    del values["model"]
    values |= {"set": list(entry.set), "measured": dict(entry.measured)}
    return {name: value for name, value in values.items() if value is not None}
