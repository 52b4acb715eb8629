"""The LLM class that both frameworks share: its arguments, and the options of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from pydantic import ConfigDict, Field, PrivateAttr, SkipValidation
from pydantic.json_schema import SkipJsonSchema

from samkv_integrations.errors import Given, InvalidOption, UnknownOption
from samkv_integrations.frameworks.engine_args import (
    AnEngine,
    EngineRef,
    ModelSource,
    engine_of,
    facts_of,
)
from samkv_integrations.frameworks.fields import (
    OWN_ANSWER_OPTIONS,
    OWN_ENGINE_OPTIONS,
    SAMPLING,
    AnswerFields,
    Arguments,
    EngineFields,
    unknown_option,
)
from samkv_integrations.option import check_options, declared
from samkv_integrations.options import AnswerOptions, AnswerSettings, EngineOptions
from samkv_integrations.prompt.quoting import RenderedPrompt
from samkv_integrations.report import Report
from samkv_integrations.runtimes import require_runtime

# -- options of a call ----------------------------------------------------------------------------

GENERATE_KWARGS = tuple(sorted({"do_sample", "stop", "timeout", *SAMPLING} - {"max_new_tokens"}))
"""Options of a call that an LLM may also set for every call."""
OF_AN_LLM = ("context_window", "stop_ids")
"""Options of answers that a call cannot override."""
CALL_KWARGS = tuple(sorted({"do_sample", "max_tokens", *declared(AnswerOptions)} - {*OF_AN_LLM}))
"""The options of one call, with the names that transformers and LangChain use."""
_LENGTH = declared(AnswerOptions)["max_new_tokens"][1]
DEFAULT_MAX_NEW_TOKENS: int = _LENGTH.default

OF_TRANSFORMERS: Mapping[str, tuple[object, str]] = MappingProxyType(
    {
        "return_full_text": (False, "an answer never repeats its prompt"),
        "skip_prompt": (True, "an answer never repeats its prompt"),
        "skip_special_tokens": (True, "an answer holds none"),
        "num_return_sequences": (1, "a prompt has one answer"),
        "num_beams": (1, "there is no beam search"),
        "use_cache": (True, "an answer always goes on from its KV entries"),
        "pad_token_id": (..., "a single prompt is never padded"),
        "max_length": (None, "it would count the prompt as well; give max_new_tokens"),
        "eos_token_id": (None, "give stopping_ids to the LLM; the model's own are known"),
    }
)
"""Option of transformers without effect here -> the only accepted value, and the reason. ``None``
means no value, ``...`` any value."""


def checked_generate_kwargs(given: Mapping[str, Any], max_new_tokens: int) -> dict[str, Any]:
    """The options that are not None. Raises UnknownOption or InvalidOption for a wrong one."""
    options = known_options("option in generate_kwargs", given, GENERATE_KWARGS)
    AnswerSettings.of(**to_options({}, options, max_new_tokens))  # raises if one is out of range
    return options


def to_options(
    given: Mapping[str, Any], defaults: Mapping[str, Any], max_new_tokens: int | None
) -> dict[str, Any]:
    """Keyword arguments of the engine for one call.

    given: the options of the call, which override ``defaults``, those of the LLM.
    max_new_tokens: the default of the call; None for `DEFAULT_MAX_NEW_TOKENS`.

    ``do_sample`` becomes a temperature: 0 for False; for True 1, unless one is given.
    """
    own = known_options("option of a call", given, CALL_KWARGS)
    options = {**defaults, **own}
    if "json_schema" in own and "stop" not in own:
        options.pop("stop", None)  # JSON ends by itself; stop strings of other answers would cut it
    if "temperature" in own and "do_sample" not in own:
        options.pop("do_sample", None)  # the temperature of a call counts
    do_sample = options.pop("do_sample", None)
    if do_sample is not None and not isinstance(do_sample, bool):
        raise InvalidOption(Given("do_sample", do_sample), "; it must be True or False")
    if do_sample is False:
        options["temperature"] = 0.0
    elif do_sample and options.setdefault("temperature", 1.0) == 0:
        raise InvalidOption("do_sample=True contradicts temperature=0; leave out either")
    if "max_tokens" in options and "max_new_tokens" in options:
        raise InvalidOption("max_tokens and max_new_tokens are the same thing; give one")
    for name in own.keys() & {"max_tokens", "max_new_tokens"}:
        check_length(name, own[name])
    length = options.pop("max_tokens", max_new_tokens)
    options.setdefault("max_new_tokens", DEFAULT_MAX_NEW_TOKENS if length is None else length)
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    return options


def known_options(kind: str, given: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """The given options that are not None and have an effect.

    kind: the name for an option of ``known`` in errors.

    Raises:
        UnknownOption: an option is not among ``known``.
        InvalidOption: an option of `OF_TRANSFORMERS` has another value than the accepted one.
    """
    found = {}
    for name, value in given.items():
        if name in known:
            if value is not None:
                found[name] = value
            continue
        if name not in OF_TRANSFORMERS:
            is_ours = name in CALL_KWARGS
            instead = {name: f"give {name} to the LLM, or to a call"} if is_ours else {}
            raise unknown_option(kind, name, known, instead)
        allowed, why = OF_TRANSFORMERS[name]
        if allowed is None:
            raise UnknownOption(f"{name!r} is not an {kind}: {why}")
        if value is not None and allowed is not ... and value != allowed:
            raise InvalidOption(Given(name, value), f"; {why}, leave it out or give {allowed}")
    return found


def check_length(called: str, value: object) -> None:
    """Raises InvalidOption for a wrong number of tokens. called: the option's name in errors."""
    assert _LENGTH.check is not None
    _LENGTH.check(called, value)


# -- the LLM -----------------------------------------------------------------------------------


def usage_of(*reports: Report) -> dict[str, Any]:
    """Token counts of one or more answers, in the form of OpenAI's API.

    ``tokens_per_step`` is a field of ours: tokens after the first one, per step of the model.
    """
    prompt_tokens = sum(report.prompt_tokens for report in reports)
    completion_tokens = sum(report.completion_tokens for report in reports)
    stepped = [report for report in reports if report.tokens_per_step]
    n_decoded = sum(report.completion_tokens - 1 for report in stepped)
    n_steps = sum((report.completion_tokens - 1) / report.tokens_per_step for report in stepped)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(report.cached_tokens for report in reports)},
        "completion_tokens_details": {
            "tokens_per_step": round(n_decoded / n_steps, 2) if n_steps else 0.0
        },
    }


class LocalLLM(Arguments, AnswerFields, EngineFields):
    """Arguments of an LLM that answers from chunk caches. The class of a framework adds its own.

    Most are declared in `samkv_integrations.options`. As with an `EngineRef`, copies share the
    engine, and pickles omit it.

    Raises:
        InvalidOption, UnknownOption: an argument is wrong, or contradicts ``engine``.
        ModelNotFound, UnsupportedModel, StoreError: see `Engine` and `ChunkStore`.
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True, protected_namespaces=(), use_attribute_docstrings=True
    )

    stopping_ids: list[SkipValidation[int]] = Field(default_factory=list)
    """Token ids that end an answer, beside the model's own."""
    engine: SkipJsonSchema[AnEngine] = Field(default=None, exclude=True, repr=False)  # type: ignore[assignment]
    """An engine to share, in place of loading a model over ``kv_dir``."""
    match_text: bool = True
    """Whether prompts are searched for the texts of cached chunks; else only handles are found."""

    _last_report: Report | None = PrivateAttr(default=None)

    # -- building the engine --------------------------------------------------------------------

    def _use(self) -> None:
        if self.engine is None and self.runtime is None:
            require_runtime()
        self._check()
        self._attach()

    def _check(self) -> None:
        """Raises for a wrong argument before the model is loaded, which takes time."""
        for name in ("method", "eviction"):
            part: object = getattr(self, name)
            if not isinstance(part, str | None):  # an LLM is serialised, so parts must be names
                raise InvalidOption(
                    f"{name} is a {type(part).__name__}; an LLM takes a name. Give an engine "
                    f"yours, and the LLM that: engine=Engine.from_pretrained(model, {name}=...)"
                )
        names = (*OWN_ENGINE_OPTIONS, *OWN_ANSWER_OPTIONS)
        given = {name: getattr(self, name) for name in names}
        check_options(EngineOptions, given)
        check_options(AnswerOptions, given)

    def _source(self) -> ModelSource:
        given = {name: getattr(self, name) for name in EngineFields.model_fields}
        return ModelSource.model_construct(engine=self.engine, **given)

    def _attach(self) -> None:
        """Load the model, or take the given engine; then set the fields to its settings."""
        source = self._source()
        self.engine = engine_of(source)
        for name, value in facts_of(self.engine).items():
            setattr(self, name, value)
        self.device_map = self.device_map or "cpu"
        if source.engine is not None or source.model is not None:
            self.dtype = self.engine.model.dtype_name  # "auto" might load it in another dtype

    # -- copies and pickles ---------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        if "engine" in self.__dict__:  # unpickled LLMs lack it
            memo[id(self.engine)] = self.engine
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[Any, Any]:
        without = self.model_copy()  # frameworks pickle, and partly delete, attributes
        without.__dict__.pop("engine", None)
        return super(LocalLLM, without).__getstate__()

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401
            if name == "engine":
                return EngineRef().engine  # raises
            return super().__getattr__(name)

    # -- what frameworks ask of an LLM ----------------------------------------------------------

    @property
    def last_report(self) -> Report | None:
        """The report of the answer that ended last; None before the first."""
        return self._last_report

    def _n_tokens(self, text: str) -> int:
        """Tokens of a part of a prompt without BOS; a handle counts as its chunk."""
        if not text:
            return 0
        return self.engine.count_tokens(RenderedPrompt(text, is_chat=True))

    def _require_room(self, context_window: int, **max_tokens: int) -> None:
        """Raises InvalidOption for a wrong window or stop id, or if a prompt has no room.

        max_tokens: most tokens of an answer, under the framework's name for it.
        """
        model = self.engine.model
        if not 0 < context_window <= model.context_window:
            raise InvalidOption(
                Given("context_window", context_window),
                f"; {model.name!r} has "
                f"{model.context_window}, give 1 to that, or None for all of it",
            )
        model.end_ids(self.stopping_ids)
        for name, number in max_tokens.items():
            if number >= context_window:
                raise InvalidOption(
                    Given(name, number),
                    " leaves no room for a prompt in the context window of "
                    f"{model.name!r}, {context_window} tokens; give less",
                )

    # -- calls ------------------------------------------------------------------------------

    def _options_of(
        self, call: Mapping[str, Any], always: Mapping[str, Any], max_new_tokens: int | None
    ) -> dict[str, Any]:
        """Keyword arguments of the engine beside the prompt, see `to_options`."""
        return {
            "chunks": None if self.match_text else (),
            "stop_ids": self.stopping_ids,
            **{name: getattr(self, name) for name in OWN_ANSWER_OPTIONS},
            **to_options(call, always, max_new_tokens),
        }
