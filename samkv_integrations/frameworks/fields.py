"""Options as fields of pydantic models, which the LLMs of both frameworks are.

The descriptions are those of the declarations in `samkv_integrations.options`; a test compares
names and defaults.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    SkipValidation,
    ValidationError,
    model_validator,
)

from samkv_integrations.errors import InvalidOption, UnknownOption
from samkv_integrations.option import Declared, declared
from samkv_integrations.options import (
    DECLARED,
    EngineOptions,
    ModelOptions,
    OnMiss,
    OwnAnswerOptions,
    StoreOptions,
)

_Model = TypeVar("_Model", bound=BaseModel)


class Arguments(BaseModel):
    """A pydantic model of keyword arguments that raises this package's errors.

    Raises UnknownOption for an argument that does not exist, InvalidOption for a wrong type.
    """

    _elsewhere: ClassVar[Mapping[str, str]] = MappingProxyType({"torch_dtype": "give dtype"})
    """Name of an option that is given elsewhere -> where to give it."""

    @model_validator(mode="wrap")
    @classmethod
    def _validated(cls, given: Any, build: ModelWrapValidatorHandler[Self]) -> Self:  # noqa: ANN401
        if not isinstance(given, Mapping):  # an object was checked when it was made
            return build(given)
        try:
            made = build(cls._arguments(given))
        except ValidationError as error:
            first = error.errors()[0]
            # the rest of loc names the types that pydantic has tried
            name = first["loc"][0] if first["loc"] else cls.__name__
            value = given.get(str(name), first["input"])
            meant = cls.model_fields[name].description if name in cls.model_fields else None
            meaning = f". {name}: {' '.join(meant.replace('``', '').split())}" if meant else ""
            raise InvalidOption(f"{name}={value!r}: {first['msg']}{meaning}") from error
        made._use()
        return made

    def _use(self) -> None:
        """Called once all arguments have the right types."""

    @classmethod
    def _arguments(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Drop None where a field does not allow it: wrappers pass None to ask for the default.

        Raises UnknownOption for an argument that does not exist.
        """
        known = {field.alias or name: field for name, field in cls.model_fields.items()}
        for name in given:
            if name not in known:
                raise unknown_option(f"argument of {cls.__name__}", name, known, cls._elsewhere)
        said = {
            name: value
            for name, value in given.items()
            if value is not None or type(None) in get_args(known[name].annotation)
        }
        for name in {"model", "model_name", "tokenizer_name"} & said.keys():
            if isinstance(said[name], os.PathLike):
                said[name] = os.fspath(said[name])
        if "dtype" in said:  # which may be a torch.dtype
            said["dtype"] = str(said["dtype"]).removeprefix("torch.")
        return said


def unknown_option(
    kind: str, name: str, known: Iterable[str], elsewhere: Mapping[str, str]
) -> UnknownOption:
    """The error for an unknown option. elsewhere: name -> what to do instead."""
    if name in elsewhere:
        return UnknownOption(f"{name!r} is no {kind}: {elsewhere[name]}")
    return UnknownOption.among(kind, name, known)


_OF_ANSWERS = declared(OwnAnswerOptions)
_OF_ENGINES = {n: each for n, each in declared(EngineOptions).items() if n not in _OF_ANSWERS}


def described(options: Declared, unset: str = "") -> Callable[[type[_Model]], type[_Model]]:
    """Gives the fields of a pydantic class the descriptions of the options of these names.

    unset: what None stands for, where an option has no None of its own.
    """

    def describe(fields: type[_Model]) -> type[_Model]:
        for name, field in fields.model_fields.items():
            if name in options:
                option = options[name][1]
                field.description = replace(option, unset=option.unset or unset).sentence
        return fields

    return describe


# Pydantic does not validate methods and the like: the checks of the options list what is allowed.


@described({**declared(ModelOptions), **declared(StoreOptions)})
@described(_OF_ENGINES, unset="the engine's")
class EngineFields(BaseModel):
    """The model, the store and the engine that an LLM is made of."""

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    model_name: str = ""
    tokenizer_name: str | None = None
    device_map: str | None = "auto"
    dtype: str = "auto"
    weights: Literal["auto", "packed", "unpacked", "int8"] = "auto"
    model_kwargs: dict[str, Any] = Field(default_factory=dict, repr=False)
    tokenizer_kwargs: dict[str, Any] = Field(default_factory=dict, repr=False)
    kv_dir: str | Path | None = None
    kv_remote: str | None = None
    namespace: str | None = None
    max_bytes: int | str | None = None
    store_bits: int | None = None
    prefix_bytes: int | str | None = None
    hot_bytes: int | str | None = None


@described(_OF_ANSWERS)
class AnswerFields(BaseModel):
    """Options of every answer of an LLM."""

    method: SkipValidation[str | None] = None
    eviction: SkipValidation[str | None] = None
    timeout: float | None = None
    on_miss: SkipValidation[OnMiss] = "compute"
    draft: int = 7


@described(DECLARED)
class SamplingFields(BaseModel):
    """Options of sampling; None for their defaults."""

    seed: int | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


OWN_ENGINE_OPTIONS = tuple(name for name, (_, each) in _OF_ENGINES.items() if each.in_llms)
"""Options of engines that are no options of an answer, and fields of LLMs."""
OWN_ANSWER_OPTIONS = tuple(name for name, (_, each) in _OF_ANSWERS.items() if each.in_llms)
"""Options of answers that are fields of LLMs, beside those of sampling."""
