"""The class that the chat model and the LLM of plain strings share: arguments, and options."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self

from langchain_core.language_models.base import BaseLanguageModel
from langchain_core.runnables import RunnableSerializable
from langchain_core.runnables.utils import AnyConfigurableField
from pydantic import ConfigDict, Field, SecretStr

from samkv_integrations import AnswerStream, Eviction, Method
from samkv_integrations.errors import InvalidOption, UnknownOption
from samkv_integrations.frameworks.engine_args import MADE_BY
from samkv_integrations.frameworks.fields import OWN_ANSWER_OPTIONS, EngineFields, SamplingFields
from samkv_integrations.frameworks.local_llm import (
    CALL_KWARGS,
    DEFAULT_MAX_NEW_TOKENS,
    GENERATE_KWARGS,
    LocalLLM,
    check_length,
    checked_generate_kwargs,
    known_options,
)
from samkv_integrations.methods import get_method

_NO_KEYS = ("method", "eviction", "timeout")  # written apart, with their options
_SYNONYMS = {
    "model_name": "model", "model_path": "model", "max_new_tokens": "max_tokens",
    "stop_sequences": "stop",
}  # fmt: skip

# Option of a call for other providers -> what to do instead.
_INSTEAD = {
    "model": "an LLM runs one model; make another",
    **dict.fromkeys(("tools", "tool_choice", "functions", "function_call"),
                    "tools are for ChatSamKV, which has bind_tools"),
    "response_format": "use with_structured_output of ChatSamKV, or json_schema",
    "n": "leave it out",
}  # fmt: skip


class LocalModel(SamplingFields, LocalLLM, BaseLanguageModel[Any]):
    """A model on this machine that answers from the KV caches of the chunks in its prompt.

    Arguments are the fields of this class and of `LocalLLM`, and those of every LangChain model:
    ``cache``, ``callbacks``, ``tags``, ``metadata``, ... ``model_name`` and
    ``model_path`` are other names of ``model``, ``max_new_tokens`` of ``max_tokens``, and
    ``stop_sequences`` of ``stop``. Arguments that only serve to load the model are not kept. A call
    may override the options of sampling, max_tokens, stop and timeout.

    Raises:
        InvalidOption, UnknownOption: an argument is wrong, or contradicts ``engine``.
        ModelNotFound, UnsupportedModel, StoreError: see `Engine` and `ChunkStore`.
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    if TYPE_CHECKING:  # type checkers know one name of an argument, and the final type of a field
        model: str = ""
        model_name: str = ""
        model_path: str = ""
        max_new_tokens: int | None = None
        stop_sequences: list[str] | str | None = None
        api_key: SecretStr | str | None = None
    else:
        model_name: str = Field(default="", alias="model")
        """A hub id, a local folder, a GGUF file, ``"smollm2"`` or ``"builtin"``."""
        api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
        """Accepted for compatibility: nothing here needs a key."""

        model = property(attrgetter("model_name"), doc="`model_name`.")
        model_path = property(attrgetter("model_name"), doc="`model_name`.")
        max_new_tokens = property(attrgetter("max_tokens"), doc="`max_tokens`.")
        stop_sequences = property(attrgetter("stop"), doc="`stop`.")

    do_sample: bool | None = None
    """Whether tokens are sampled, at temperature 1 by default; None: only with a temperature."""
    max_tokens: int | None = DEFAULT_MAX_NEW_TOKENS
    """Most tokens of an answer."""
    stop: list[str] | str | None = None
    """Strings that end an answer; the answer does not include them."""
    max_retries: int | None = Field(default=None, ge=0)
    """Accepted for compatibility: no error here goes away by a second try."""

    @classmethod
    def _arguments(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        return super()._arguments(_under_one_name(given))

    def _check(self) -> None:
        if self.engine is None and not self.model_name:
            raise InvalidOption(
                "give model (a hub id, a folder, a GGUF file, 'smollm2' or 'builtin') or engine"
            )
        if self.max_tokens is None:
            self.max_tokens = DEFAULT_MAX_NEW_TOKENS
        checked_generate_kwargs(self._always, self.max_tokens)
        super()._check()

    def _attach(self) -> None:
        super()._attach()
        # LangChain copies an LLM by passing its fields to the constructor, the engine included;
        # arguments that load a model would contradict that. They may also hold a hub token.
        for name in MADE_BY["engine"]:
            setattr(
                self, name, EngineFields.model_fields[name].get_default(call_default_factory=True)
            )
        assert self.max_tokens is not None  # `_check` has seen to it
        self._require_room(self.engine.model.context_window, max_tokens=self.max_tokens)

    @classmethod
    def from_model_id(
        cls,
        model_id: str,
        task: str = "text-generation",
        backend: str = "default",
        device: int | None = None,
        device_map: str | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        pipeline_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Self:
        """From the arguments of ``HuggingFacePipeline.from_model_id``.

        device: -1 for the CPU, or the number of a GPU; None for device_map, else ``"auto"``.
        model_kwargs: for loading the model and the tokenizer.
        pipeline_kwargs: options of every call.
        kwargs: further arguments of the class.
        """
        InvalidOption.unless_among("task", task, ["text-generation"])
        InvalidOption.unless_among("backend", backend, ["default"])
        if device is not None and device_map is not None:
            raise InvalidOption("device and device_map are the same option; give one")
        if device is not None:
            device_map = "cpu" if device < 0 else f"cuda:{device}"
        known = (*CALL_KWARGS, "stop_sequences")
        always = known_options("option in pipeline_kwargs", pipeline_kwargs or {}, known)
        given = {name: value for name, value in kwargs.items() if value is not None}
        if model_kwargs:
            always["model_kwargs"] = dict(model_kwargs)
            given.setdefault("tokenizer_kwargs", dict(model_kwargs))
        if twice := given.keys() & {"model", "device_map", *always}:
            raise InvalidOption(f"{sorted(twice)[0]} is given twice; give it once")
        return cls(model=model_id, device_map=device_map or "auto", **always, **given)

    def configurable_fields(self, **kwargs: AnyConfigurableField) -> RunnableSerializable[Any, Any]:
        """Fields that a call may set in its config: options of answers.

        Raises InvalidOption for arguments of the engine, because copies of an LLM share it.
        """
        of_engine = {*EngineFields.model_fields, "model", "tokenizer", "engine"}
        for name in sorted(kwargs.keys() & of_engine):
            raise InvalidOption(
                f"configurable_fields({name}=...): {name} must stay, as copies of an LLM share "
                "its engine; give several LLMs to configurable_alternatives"
            )
        return super().configurable_fields(**kwargs)

    # -- what LangChain asks of a model ---------------------------------------------------------

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """Everything that an answer depends on; LangChain's caches of answers use it as the key."""
        always = {name: value for name, value in self._always.items() if name != "timeout"}
        # LangChain writes the stop strings of a call under "stop", also if there are none
        always |= {"stop_sequences": always.pop("stop", None)}
        engine, model = self.engine, self.engine.model
        template = str(model.chat_template).encode()
        return {
            "model_name": self.model_name,
            "engine": engine.fingerprint.digest,
            "chat_template": hashlib.blake2b(template, digest_size=16).hexdigest(),
            # with its options, which a name would not show
            "method": _written(engine.method if self.method is None else get_method(self.method)),
            "eviction": _written(engine.eviction if self.eviction is None else self.eviction),
            "match_text": self.match_text,
            **{name: getattr(self, name) for name in OWN_ANSWER_OPTIONS if name not in _NO_KEYS},
            "max_tokens": self.max_tokens or DEFAULT_MAX_NEW_TOKENS,
            "end_ids": sorted(model.end_ids(self.stopping_ids)),
            **always,
        }

    def get_num_tokens(self, text: str) -> int:
        """Tokens of ``text``; a handle counts as its chunk."""
        if self.custom_get_token_ids is not None:
            return super().get_num_tokens(text)
        return self._n_tokens(text)

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of ``text`` as it stands."""
        if self.custom_get_token_ids is not None:
            return super().get_token_ids(text)
        return self.engine.model.tokenize(text, special=True)

    # -- calls of the engine ---------------------------------------------------------------------

    @property
    def _always(self) -> dict[str, Any]:
        """Options of every call."""
        found = {}
        for name in GENERATE_KWARGS:
            if (value := getattr(self, name)) is not None:
                found[name] = copy.copy(value)
        return found

    def _options(self, stop: list[str] | None, given: Mapping[str, Any]) -> dict[str, Any]:
        call = _under_one_name(given)
        call.pop("stream", None)  # an option of LangChain alone
        for name in call.keys() & _INSTEAD.keys():
            raise UnknownOption(f"{name!r} is not an option of a call: {_INSTEAD[name]}")
        if stop is not None:
            if call.get("stop") is not None:
                raise InvalidOption("stop_sequences and stop are the same option; give one")
            call["stop"] = stop
        return self._options_of(call, self._always, self.max_tokens)

    def _metadata(self, answer: AnswerStream) -> dict[str, Any]:
        """``generation_info`` and ``response_metadata`` of a finished answer."""
        self._last_report = report = answer.report
        return {
            "model_name": report.model,
            "model_provider": "samkv",
            "finish_reason": answer.finish_reason,
            "samkv": report.to_dict(),
        }


def _written(part: str | Method | Eviction | None) -> str:
    """The `repr` without the addresses of functions, which differ between processes.

    A lambda keeps its address, which alone distinguishes it from other lambdas.
    """
    return re.sub(r"<function ([\w.]+) at 0x\w+>", r"\1", repr(part))


def _under_one_name(given: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in given.items():
        canonical = _SYNONYMS.get(name, name)
        if canonical in found:
            raise InvalidOption(f"{name} and {canonical} are the same option; give one")
        if canonical == "max_tokens" and isinstance(value, int):
            check_length(name, value)  # here, because the error should have the given name
        found[canonical] = value
    return found
