"""``samkv.toml``: the settings that ``samkv tune`` found to be enough, beside the chunk caches.

An entry is for one model, by name. An engine that opens the folder takes it unless it is told
otherwise.
"""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import BaseModel, ConfigDict, Strict, TypeAdapter, ValidationError

from samkv_integrations.errors import InvalidOption, UnknownOption
from samkv_integrations.methods import DEFAULT_METHOD, Method, get_method
from samkv_integrations.methods.base import with_option
from samkv_integrations.methods.eviction import NO_EVICTION, Eviction, get_eviction, with_budget
from samkv_integrations.runtimes.transformers.entries.quantise import (
    DEFAULT_STORE_BITS,
    check_store_bits,
)
from samkv_integrations.runtimes.transformers.model.model import Model
from samkv_integrations.store.base import Store
from samkv_integrations.store.disk import ChunkStore
from samkv_integrations.store.folder import read_small, write_file

TUNED_FILE = "samkv.toml"

_HEADER = """\
# The settings that 'samkv tune' found enough for the models that are named, on these chunk caches.
# Whoever opens this folder with such a model takes them, unless told otherwise: docs/tune.md.
"""

_LOG = logging.getLogger(__name__)

Scalar = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class TunedSetting:
    """The entry of one model.

    model: the name that the engine loads it by. method, set: as ``--method`` and ``--set``.
    eviction, eviction_budget: the method's eviction, and its share of the prompt; ``"none"`` for no
        eviction, and None for the default budget of the rule.
    store_bits: bits of the caches that it was measured on. measured: figures, for people.

    Raises UnknownOption or InvalidOption for what no engine can do.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    method: str
    model: str = ""
    set: tuple[str, ...] = ()
    eviction: str = NO_EVICTION
    eviction_budget: Annotated[float | None, Strict()] = None
    store_bits: Annotated[int, Strict()] = DEFAULT_STORE_BITS
    measured: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_store_bits(self.store_bits)
        self.to_method()  # raises

    def to_method(self) -> Method:
        """The method with its options and its eviction."""
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
        """The setting as options of the command line."""
        words = [f"--method {self.method}", *(f"--set {setting}" for setting in self.set)]
        words += [f"--eviction {self.eviction}"]
        if self.eviction_budget is not None:
            words += [f"--eviction-budget {self.eviction_budget:g}"]
        return " ".join(words)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    models: dict[str, dict[str, Any]] = {}


def choices_of(
    model: Model,
    store: Store,
    method: str | Method | None,
    eviction: str | Eviction | None,
    store_bits: int | None,
) -> tuple[Method, int, TunedSetting | None]:
    """The method and the bits of an engine, and the tuned entry that named the method, if any.

    Arguments come first, then the entry beside the caches, then the defaults. Raises UnknownOption
    or InvalidOption if one is wrong.
    """
    get_eviction(eviction)
    entry, bits = None, store_bits
    if (method is None or bits is None) and isinstance(store, ChunkStore):
        entry = read_tuned(store.path).get(model.name)
    if bits is None:
        bits = DEFAULT_STORE_BITS if entry is None else entry.store_bits
    if method is not None or entry is None:
        return get_method(DEFAULT_METHOD if method is None else method), bits, None
    if entry.store_bits != bits:  # what was enough on finer caches may not be on these
        _LOG.warning(
            "%s: the setting for %r was measured on caches of %d bits and is not taken with %d; "
            "ingest again with --store-bits %d, or tune again",
            TUNED_FILE, model.name, entry.store_bits, bits, entry.store_bits,
        )  # fmt: skip
        return get_method(DEFAULT_METHOD), bits, None
    _LOG.info("%s: %r answers with %s", TUNED_FILE, model.name, entry.line)
    return entry.to_method(), bits, entry


def read_tuned(folder: str | os.PathLike[str]) -> dict[str, TunedSetting]:
    """The entries in a folder of chunk caches, by model; none without the file.

    Raises InvalidOption, with file, key and what is allowed, if it is broken.
    """
    file, where = Path(folder) / TUNED_FILE, ""
    entries = dict[str, TunedSetting]()
    try:
        found = _File.model_validate(tomllib.loads(read_small(file).decode("utf-8-sig")))
        for name, table in found.models.items():
            where = f"models.{name}: "
            entry = TypeAdapter(TunedSetting).validate_python(table)
            entries[name] = replace(entry, model=name)
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(f"{file} cannot be read ({error}); mend or delete it") from error
    except (ValueError, RecursionError, UnknownOption, InvalidOption) as error:
        why = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            known = ", ".join(each.name for each in fields(TunedSetting) if each.name != "model")
            value = "" if first["type"] == "missing" else f"={first['input']!r:.80}"
            why = (
                f"{'.'.join(map(str, first['loc']))}{value}: {first['msg']}; the file holds tables "
                f'[models."NAME"], whose keys are {known}'
            )
        raise InvalidOption(
            f"{file}: {where}{why}; mend or delete it; without it, 'samkv tune' writes a new one"
        ) from error
    return entries


def write_tuned(folder: str | os.PathLike[str], setting: TunedSetting) -> Path:
    """Write an entry, in place of the one that the model had; returns the file.

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
        write_file(file, f"{_HEADER}\n{tomli_w.dumps({'models': tables})}".encode())
    except (OSError, UnicodeEncodeError) as error:
        raise InvalidOption(f"{file} cannot be written ({error}); allow access there") from error
    return file
