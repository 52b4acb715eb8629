"""Options as fields of pydantic models, which the LLMs of both frameworks are.

A field repeats the name and the type of an option, for type checkers. Its default and its
description come from the declaration in `samkv_integrations.options`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    SkipValidation,
    ValidationError,
    model_validator,
)

from samkv_integrations.errors import Given, InvalidOption, SamkvError, UnknownOption
from samkv_integrations.option import OnMiss, declared
from samkv_integrations.options import (
    AnswerOptions,
    EngineOptions,
    LlamaCppOptions,
    ModelOptions,
    SamplingOptions,
    StoreOptions,
)


class Arguments(BaseModel):
    """A pydantic model of keyword arguments that raises this package's errors.

    Raises UnknownOption for an argument that does not exist, InvalidOption for a wrong type.
    """

    _elsewhere: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "torch_dtype": "give dtype",
            "repeat_penalty": "give repetition_penalty",
            "n_batch": "it changes no answer; leave it out",
            "verbose": "llama.cpp logs nothing here; leave it out",
            "model_url": "download the file, and give its path as model_path",
            "chat_format": "the chat template of the file is used; leave it out",
            "f16_kv": "give type_k and type_v",
        }
    )
    """Name of an option that is given elsewhere -> where to give it."""

    if not TYPE_CHECKING:  # for type checkers, the fields are the arguments

        def __init__(self, *args: Any, **given: Any) -> None:
            try:
                super().__init__(*args, **given)
            except ValidationError as error:  # pydantic wraps every ValueError
                if (ours := _ours(error)) is None:
                    raise
                raise ours from ours.__cause__

    @model_validator(mode="wrap")
    @classmethod
    def _validated(cls, given: Any, build: ModelWrapValidatorHandler[Self]) -> Self:  # noqa: ANN401
        if not isinstance(given, Mapping):  # an object was checked when it was made
            return build(given)
        try:
            made = build(cls._arguments(given))
        except ValidationError as error:
            if (ours := _ours(error)) is not None:
                raise ours from error
            first = error.errors()[0]
            # the rest of loc has the types that pydantic has tried
            name = str(first["loc"][0]) if first["loc"] else cls.__name__
            field = cls.model_fields.get(name)
            meaning = f". {name}: {field.description}" if field and field.description else ""
            value = given.get(name, first["input"])
            raise InvalidOption(Given(name, value), f": {first['msg']}{meaning}") from error
        made._use()
        return made

    def _use(self) -> None:
        """Hook for subclasses, called once all arguments have the right types."""

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
        if "dtype" in said:  # dtype may be a torch.dtype
            said["dtype"] = str(said["dtype"]).removeprefix("torch.")
        return said


def _ours(error: ValidationError) -> SamkvError | None:
    """The error of this package, if the first error of a validator is one."""
    found = error.errors()[0].get("ctx", {}).get("error")
    return found if isinstance(found, SamkvError) else None


def unknown_option(
    kind: str, name: str, known: Iterable[str], elsewhere: Mapping[str, str]
) -> UnknownOption:
    """The error for an unknown option. elsewhere: name -> what to do instead."""
    if name in elsewhere:
        return UnknownOption(f"{name!r} is not an {kind}: {elsewhere[name]}")
    return UnknownOption.among(kind, name, known)


_ANSWER, _ENGINE = declared(AnswerOptions), declared(EngineOptions)
_DECLARED = {
    **declared(ModelOptions), **declared(LlamaCppOptions), **declared(StoreOptions), **_ENGINE,
    **_ANSWER,
}  # fmt: skip


def _of(name: str, **more: Any) -> Any:  # noqa: ANN401
    """The field of an option. more: arguments of pydantic's `Field`."""
    option = _DECLARED[name][1]
    if isinstance(option.default, dict):
        return Field(default_factory=dict, description=option.text, **more)
    return Field(**{"default": option.default, "description": option.text, **more})


# Pydantic does not check the values: the checks of the options name what is allowed.


class EngineFields(BaseModel):
    """The model, the store and the engine that an LLM is made of."""

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    model_name: str = _of("model_name")
    tokenizer_name: str | None = _of("tokenizer_name")
    device_map: str | None = _of("device_map")
    dtype: str = _of("dtype")
    model_kwargs: dict[str, Any] = _of("model_kwargs", repr=False)
    tokenizer_kwargs: dict[str, Any] = _of("tokenizer_kwargs", repr=False)
    runtime: str | None = _of("runtime")
    n_threads: int | None = _of("n_threads")
    n_gpu_layers: int | None = _of("n_gpu_layers")
    n_ctx: int | None = _of("n_ctx")
    type_k: str | int | None = _of("type_k")
    type_v: str | int | None = _of("type_v")
    main_gpu: int | None = _of("main_gpu")
    tensor_split: list[float] | None = _of("tensor_split")
    use_mmap: bool | None = _of("use_mmap")
    use_mlock: bool | None = _of("use_mlock")
    kv_dir: str | Path | None = _of("kv_dir")
    kv_remote: str | None = _of("kv_remote")
    namespace: str | None = _of("namespace")
    max_bytes: int | str | None = _of("max_bytes")
    store_bits: int | None = _of("store_bits")
    prefix_bytes: int | str | None = _of("prefix_bytes")
    hot_bytes: int | str | None = _of("hot_bytes")


class AnswerFields(BaseModel):
    """Options of every answer of an LLM."""

    method: SkipValidation[str | None] = _of("method")
    eviction: SkipValidation[str | None] = _of("eviction")
    timeout: float | None = _of("timeout")
    on_miss: SkipValidation[OnMiss] = _of("on_miss")
    draft: int = _of("draft")


class SamplingFields(BaseModel):
    """Options of sampling; None for their defaults."""

    seed: int | None = _of("seed", default=None)
    repetition_penalty: float | None = _of("repetition_penalty")
    temperature: float | None = _of("temperature", default=None)
    top_k: int | None = _of("top_k", default=None)
    top_p: float | None = _of("top_p", default=None)
    min_p: float | None = _of("min_p", default=None)


SAMPLING = tuple(declared(SamplingOptions))
"""Options of sampling."""
OWN_ENGINE_OPTIONS = tuple(
    name for name, (_, each) in _ENGINE.items() if each.of_llms and name not in _ANSWER
)
"""Options of engines alone (not of answers) that are fields of LLMs."""
OWN_ANSWER_OPTIONS = tuple(
    name for name, (_, each) in _ANSWER.items() if each.of_llms and name not in SAMPLING
)
"""Options of answers that are fields of LLMs, beside those of sampling."""
