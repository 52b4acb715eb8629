"""What the LLMs of both frameworks share: arguments, options of a call, turns, and tools.

Both frameworks declare their components with pydantic, which comes with them.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SkipValidation,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.options import (
    AnswerSettings,
    check_given_bits,
    check_on_miss,
    check_timeout,
)
from samkv_integrations.engine.report import Report
from samkv_integrations.errors import InvalidOption, UnknownOption
from samkv_integrations.eviction import get_eviction
from samkv_integrations.frameworks.engine_args import (
    EngineRef,
    ModelSource,
    engine_of,
    folder_of,
    own_choices,
    remote_of,
)
from samkv_integrations.methods import get_method
from samkv_integrations.model.model import Model
from samkv_integrations.model.quoting import Chat, RenderedPrompt
from samkv_integrations.model.sampling import OPTIONS, Sampling, check_option
from samkv_integrations.prompt.reader import Prompt
from samkv_integrations.prompt.resolve import OnMiss

# -- options of a call ----------------------------------------------------------------------------

GENERATE_KWARGS = tuple(sorted({"do_sample", "stop", "timeout", *OPTIONS} - {"max_new_tokens"}))
CALL_KWARGS = (*GENERATE_KWARGS, "max_tokens", "max_new_tokens")
_OF_THE_LLM = ("method", "eviction", "on_miss")
ONE_CALL_KWARGS = (*CALL_KWARGS, *_OF_THE_LLM, "json_schema")
"""Those, arguments of the LLM that a call may give anew, and what no LLM has for all calls."""
DEFAULT_MAX_NEW_TOKENS = Sampling().max_new_tokens

WITHOUT_EFFECT: Mapping[str, tuple[object, str]] = MappingProxyType(
    {
        "return_full_text": (False, "an answer never repeats its prompt"),
        "skip_prompt": (True, "an answer never repeats its prompt"),
        "skip_special_tokens": (True, "an answer holds none"),
        "num_return_sequences": (1, "a prompt has one answer"),
        "num_beams": (1, "there is no beam search"),
        "use_cache": (True, "an answer always goes on from its KV entries"),
    }
)
"""Options of transformers -> the only value that they can have here, which is accepted; and why."""

ANY_VALUE = ("pad_token_id",)
"""Those that mean nothing here: one prompt at a time is never padded."""

# Options that belong elsewhere, or nowhere -> what to do instead.
_INSTEAD = {
    **{name: f"give {name} to the LLM, or to a call" for name in ("max_new_tokens", *_OF_THE_LLM)},
    "max_length": "it would count the prompt as well; give max_new_tokens",
    "eos_token_id": "give stopping_ids to the LLM; the model's own are known",
}


def checked_generate_kwargs(given: Mapping[str, Any], max_new_tokens: int) -> dict[str, Any]:
    """The options that were given and are not None. Raises unless all are known and in range."""
    options = known_options("option in generate_kwargs", given, GENERATE_KWARGS)
    AnswerSettings.of(**to_options({}, options, max_new_tokens))  # raises if one is out of range
    return options


def to_options(
    given: Mapping[str, Any], defaults: Mapping[str, Any], max_new_tokens: int | None
) -> dict[str, Any]:
    """Keyword arguments of the engine: those of one call, over those of the LLM.

    max_new_tokens: of a call that names no number; None for `DEFAULT_MAX_NEW_TOKENS`.

    ``do_sample`` becomes a temperature: without one it is 0 for False and 1 for True.
    """
    own = known_options("option of a call", given, ONE_CALL_KWARGS)
    options = {**defaults, **own}
    if "json_schema" in own and "stop" not in own:
        options.pop("stop", None)  # JSON ends by itself, and what ends other answers would cut it
    if "temperature" in own and "do_sample" not in own:
        options.pop("do_sample", None)  # a call that gives a temperature wants that
    do_sample = options.pop("do_sample", None)
    if do_sample is not None and not isinstance(do_sample, bool):
        raise InvalidOption(f"do_sample={do_sample!r}; it must be True or False")
    if do_sample is False:
        options["temperature"] = 0.0
    elif do_sample and options.setdefault("temperature", 1.0) == 0:
        raise InvalidOption("do_sample=True and temperature=0 contradict; leave out either")
    if "max_tokens" in options and "max_new_tokens" in options:
        raise InvalidOption("max_tokens and max_new_tokens are the same thing; give one")
    for name in own.keys() & {"max_tokens", "max_new_tokens"}:
        check_option("max_new_tokens", own[name], name)
    length = options.pop("max_tokens", max_new_tokens)
    options.setdefault("max_new_tokens", DEFAULT_MAX_NEW_TOKENS if length is None else length)
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    return options


def known_options(kind: str, given: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """What was given, without Nones and without what changes nothing here.

    Raises:
        UnknownOption: one is none of ``known``; kind: what it should have been, in words.
        InvalidOption: one of `WITHOUT_EFFECT` would have an effect.
    """
    found = {}
    for name, value in given.items():
        if name in known:
            if value is not None:
                found[name] = value
        elif name in WITHOUT_EFFECT:
            allowed, why = WITHOUT_EFFECT[name]
            if value is not None and value != allowed:
                raise InvalidOption(f"{name}={value!r}; {why}, leave it out or give {allowed}")
        elif name not in ANY_VALUE:
            raise unknown_option(kind, name, known, _INSTEAD)
    return found


def unknown_option(
    kind: str, name: str, known: Iterable[str], elsewhere: Mapping[str, str]
) -> UnknownOption:
    """The error for an option that there is not; elsewhere: name -> what to do instead."""
    if name in elsewhere:
        return UnknownOption(f"{name!r} is no {kind}: {elsewhere[name]}")
    return UnknownOption.among(kind, name, known)


# -- tools -----------------------------------------------------------------------------------------

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAGGED = re.compile(f"{_OPEN}(.*?)(?:{_CLOSE}|$)", re.DOTALL)
_ID_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolForm:
    """How calls are written in an answer.

    arguments: what the arguments are called beside ``name``.
    tagged: whether each call stands between ``<tool_call>`` tags, and other text may too; else the
        answer is one call or a list of them, or text.
    """

    arguments: str
    tagged: bool


@dataclass(frozen=True)
class ToolCall:
    """A call that can be made. id: nine letters and digits, which all templates take."""

    name: str
    arguments: dict[str, Any]
    id: str


@dataclass(frozen=True)
class ToolAnswer:
    """An answer apart: text, calls, and what was to be a call and is none, with its tags."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    broken: tuple[str, ...] = ()


def form_of(model: Model) -> ToolForm:
    """The form that the model's chat template asks for.

    Raises InvalidOption if it takes no tools, or its form is none of those that are read here.
    """
    template = model.tool_template
    if template is None:
        raise InvalidOption(
            f"the chat template of {model.name!r} takes no tools, so that the model would not know "
            "of them; retrieve in the chain, or take a model whose template does"
        )
    if _OPEN in template and "<function=" not in template and "<arg_key>" not in template:
        return ToolForm("arguments", tagged=True)  # Hermes, Qwen2.5, Qwen3
    if '"parameters": dictionary of argument name' in template:
        return ToolForm("parameters", tagged=False)  # Llama 3.1 to 3.3
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template:
        return ToolForm("arguments", tagged=False)  # Mistral
    raise InvalidOption(
        f"the chat template of {model.name!r} takes tools, but has calls written in a form that is "
        "not read here; read are those of Hermes and Qwen (<tool_call>), Llama 3 and Mistral "
        "([TOOL_CALLS])"
    )


def takes_tools(model: Model) -> bool:
    """Whether the model can be given tools: `form_of` has an answer."""
    try:
        form_of(model)
    except InvalidOption:
        return False
    return True


@dataclass(frozen=True)
class ToolUse:
    """The tools of one call of a model, in OpenAI's form. forced: names one of which it must call.

    A forced answer is one call and nothing else, without tags, held to the tool's own schema.
    """

    tools: tuple[Mapping[str, Any], ...]
    form: ToolForm
    forced: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: Model, tools: Sequence[Mapping[str, Any]], choice: object) -> ToolUse:
        """choice: None or ``auto``, ``any`` (``required``, True), or a name.

        A name may be given in OpenAI's form. Raises InvalidOption for anything else, and as
        `form_of` does.
        """
        try:
            names = tuple(str(tool["function"]["name"]) for tool in tools)
        except (TypeError, KeyError) as error:
            raise InvalidOption(
                f"tools={tools!r:.80}; give a list of tools, each a mapping with 'function', which "
                "has a 'name'"
            ) from error
        if isinstance(choice, Mapping):
            function = choice.get("function", {})
            choice = function.get("name", choice) if isinstance(function, Mapping) else choice
        if choice in (None, False, "auto"):
            forced: tuple[str, ...] = ()
        elif choice in (True, "any", "required"):
            forced = names
        elif choice in names:
            forced = (str(choice),)
        else:
            raise InvalidOption(
                f"tool_choice={choice!r}; allowed: auto, any, or one of {', '.join(names) or '-'}"
            )
        return cls(tuple(tools), form_of(model), forced)

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """What a forced answer is held to; None for one that is free."""
        if not self.forced:
            return None
        functions = {tool["function"]["name"]: tool["function"] for tool in self.tools}
        calls, parameters = [], {}
        for number, name in enumerate(self.forced):
            # Each tool's schema goes on at a place of its own, and its references with it.
            place, schema = f"tool{number}", functions[name].get("parameters") or {}
            parameters[place] = _moved(schema, place)
            properties = {
                "name": {"const": name},
                self.form.arguments: {"$ref": f"#/$defs/{place}"},
            }
            calls.append({"type": "object", "properties": properties, "required": list(properties)})
        return {"anyOf": calls, "$defs": parameters}

    def read(self, text: str) -> ToolAnswer:
        """The calls of a whole answer, and the text beside them."""
        if self.form.tagged and not self.forced:
            parts = [(match[0], self._call(match[1])) for match in _TAGGED.finditer(text)]
            return ToolAnswer(
                _TAGGED.sub("", text).rstrip() if parts else text,
                tuple(call for _, call in parts if call),
                tuple(whole for whole, call in parts if not call),
            )
        try:
            value, end = json.JSONDecoder().raw_decode(text.strip())
        except ValueError:
            return ToolAnswer(text)
        calls = [self._call(json.dumps(v)) for v in (value if isinstance(value, list) else [value])]
        if not calls or None in calls:
            return ToolAnswer(text)
        return ToolAnswer(text.strip()[end:].strip(), tuple(call for call in calls if call))

    def shown(self, text: str) -> str:
        """As much of an unfinished answer as is text beside calls for certain."""
        if self.form.tagged and not self.forced:
            before = text.partition(_OPEN)[0]
            held = max((n for n in range(1, len(_OPEN)) if before.endswith(_OPEN[:n])), default=0)
            return before[: len(before) - held].rstrip()
        may_be_call = text.lstrip()[:1] in ("", "{", "[")
        return "" if self.forced or may_be_call else text

    def _call(self, text: str) -> ToolCall | None:
        """The call that ``text`` is the JSON of; None if it is none, or was cut."""
        try:
            call = json.loads(text)
            name, arguments = call["name"], call.get(self.form.arguments, {})
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, TypeError, AttributeError, KeyError):
            return None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        letters = (secrets.choice(_ID_LETTERS) for _ in range(9))
        return ToolCall(name, arguments, "".join(letters))


class ShownText:
    """The text of a stream, as soon as it is certain that it is no call of a tool.

    use: the tools of the call; without any, all text is shown at once. text: what is shown so far.
    """

    def __init__(self, use: ToolUse | None) -> None:
        self._use = use
        self._text = self.text = ""

    def push(self, delta: str) -> str:
        """What ``delta`` adds to the text that is shown."""
        self._text += delta
        text = self._text if self._use is None else self._use.shown(self._text)
        piece = text[len(self.text) :]
        self.text += piece
        return piece

    def rest(self) -> tuple[str, ToolAnswer]:
        """What was held back of the text, and the whole answer apart."""
        found = ToolAnswer(self._text) if self._use is None else self._use.read(self._text)
        return found.text[len(self.text) :], found


def _moved(schema: Any, name: str) -> Any:  # noqa: ANN401
    """A schema whose references to its own root work at ``#/$defs/name``."""
    if isinstance(schema, list):
        return [_moved(item, name) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: f"#/$defs/{name}{value[1:]}"
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, name)
        for key, value in schema.items()
    }


# -- turns of a chat -------------------------------------------------------------------------------


def merged(turns: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns for a chat template. Neighbours of one role become one: most want turns.

    What belongs to a call of a tool stays by itself, because a template pairs calls and results.
    """
    found: list[dict[str, Any]] = []
    for turn in turns:
        last = found[-1] if found else {}
        if turn.keys() == last.keys() == {"role", "content"} and turn["role"] == last["role"]:
            last["content"] += f"\n\n{turn['content']}"
        else:
            found.append(dict(turn))
    return found


def of_calls(content: str, calls: Iterable[ToolCall]) -> dict[str, Any]:
    """The assistant's turn with these calls; without any it is a turn like others."""
    written = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]
    turn = {"role": "assistant", "content": content}
    return {**turn, "tool_calls": written} if written else turn


def of_result(content: str, call_id: str, name: str | None) -> dict[str, Any]:
    """What the tool of a call returned."""
    turn = {"role": "tool", "content": content, "tool_call_id": call_id}
    return {**turn, "name": name} if name else turn


# -- arguments -------------------------------------------------------------------------------------


def usage_of(*reports: Report) -> dict[str, Any]:
    """The token counts of answers, in the form of OpenAI's API."""
    prompt_tokens = sum(report.prompt_tokens for report in reports)
    completion_tokens = sum(report.completion_tokens for report in reports)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(report.cached_tokens for report in reports)},
    }


class LocalLLM(BaseModel):
    """Arguments of an LLM that answers from chunk caches. A framework's class adds its own.

    Copies share the engine, and pickles leave it behind, as those of an `EngineRef`.

    Raises:
        InvalidOption, UnknownOption: an argument is wrong, or contradicts ``engine``.
        ModelNotFound, UnsupportedModel, StoreError: see `Engine` and `ChunkStore`.
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True, protected_namespaces=(), use_attribute_docstrings=True
    )

    model_name: str = ""
    """A hub id, a local folder, a GGUF file, ``"smollm2"`` or ``"builtin"``."""
    tokenizer_name: str | None = None
    """Hub id or folder of the tokenizer, if it is not the model's own."""
    device_map: str | None = "auto"
    """``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``; None for ``"cpu"``. Several devices:
    ``model_kwargs={"device_map": ...}``."""
    dtype: str = "auto"
    """``"float32"``, ``"bfloat16"``, or ``"auto"`` for the checkpoint's; float32 where this
    processor computes bfloat16 slowly."""
    model_kwargs: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Passed on to ``from_pretrained`` of the model: ``revision``, ``token``, ``cache_dir``,
    ``local_files_only`` and so on."""
    tokenizer_kwargs: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Passed on to ``from_pretrained`` of the tokenizer."""
    stopping_ids: list[SkipValidation[int]] = Field(default_factory=list)
    """Token ids that end an answer, beside the model's own."""
    kv_dir: str | Path | None = None
    """Folder of the chunk caches; None keeps them in memory."""
    kv_remote: str | None = None
    """Where machines share their chunk caches, such as ``s3://bucket/prefix``; ``kv_dir`` is then
    what this machine keeps of them. None for caches of this machine alone."""
    namespace: str | None = None
    """Whose the chunk caches are, such as a tenant's: none is found, or read, under another one;
    None for the engine's, which is ``""`` by default."""
    max_bytes: int | None = None
    """Bytes that the chunk caches in ``kv_dir`` may take on disk, those of all namespaces together
    and for every process from now on; None for what was said before. What was used longest ago
    makes room, and is computed again when it is asked for."""
    store_bits: int | None = None
    """Bits of the numbers in chunk caches: 4, 8, or 16 for the model's dtype; None for the
    engine's, which are 4 by default."""
    engine: SkipJsonSchema[Engine] = Field(default=None, exclude=True, repr=False)  # type: ignore[assignment]
    """An engine to share, in place of loading a model over ``kv_dir``."""
    method: SkipValidation[str | None] = None
    """How to answer, a name out of ``METHODS``; None for the engine's."""
    eviction: SkipValidation[str | None] = None
    """Which KV entries an answer goes on with after its first token, a name out of ``EVICTIONS``
    or ``"none"`` for all; None for the engine's."""
    match_text: bool = True
    """Whether texts of cached chunks are found in prompts; else handles alone are."""
    on_miss: SkipValidation[OnMiss] = "compute"
    """For a chunk without a usable cache: ``"compute"`` (as a chunk, and keep it; with ``auto``
    only where that does not take longer than full prefill), ``"text"`` (compute its text, this
    once) or ``"error"``."""

    timeout: float | None = None
    """Seconds after which an answer that is not complete ends with `TimedOut`."""

    _elsewhere: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Names that are no arguments -> where they belong."""
    _last_report: Report | None = PrivateAttr(default=None)

    # -- from arguments to an engine ------------------------------------------------------------

    @model_validator(mode="wrap")
    @classmethod
    def _validated(cls, given: Any, build: ModelWrapValidatorHandler[Self]) -> Self:  # noqa: ANN401
        if not isinstance(given, Mapping):  # an LLM was checked when it was made
            return build(given)
        try:
            llm = build(cls._arguments(given))
        except ValidationError as error:
            first = error.errors()[0]
            # what follows the name in a path are pydantic's words for the kinds that it tried
            name = first["loc"][0] if first["loc"] else cls.__name__
            value = given.get(str(name), first["input"])
            meant = cls.model_fields[name].description if name in cls.model_fields else None
            meaning = f". {name}: {' '.join(meant.replace('``', '').split())}" if meant else ""
            raise InvalidOption(f"{name}={value!r}: {first['msg']}{meaning}") from error
        llm._check()
        llm._attach()
        return llm

    @classmethod
    def _arguments(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that say something. Raises UnknownOption for one that there is not.

        A wrapper that has no own opinion passes None, also for what cannot be None.
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
        if "dtype" in said:  # a torch.dtype, too
            said["dtype"] = str(said["dtype"]).removeprefix("torch.")
        return said

    def _check(self) -> None:
        """Raises for what is wrong without a model: loading one takes its time."""
        for name in ("method", "eviction"):
            part: object = getattr(self, name)
            if not isinstance(part, str | None):  # an LLM is written down, which a name can be
                raise InvalidOption(
                    f"{name} is a {type(part).__name__}; an LLM takes a name. Give an engine "
                    f"yours, and the LLM that: engine=Engine.from_pretrained(model, {name}=...)"
                )
        if self.method is not None:
            get_method(self.method)
        get_eviction(self.eviction)
        check_given_bits(self.store_bits)
        check_timeout(self.timeout)
        check_on_miss(self.on_miss)

    def _source(self) -> ModelSource:
        own = type(self).model_fields.keys() & {field.name for field in fields(ModelSource)}
        given = {name: getattr(self, name) for name in own}
        given |= {"model_name": self.model_name or None, "device_map": self.device_map or "cpu"}
        return ModelSource(**given)

    def _attach(self) -> None:
        """Load the model, unless an engine was given that has it; say what the engine is."""
        source = self._source()
        was_given = source.engine is not None or source.model is not None
        self.engine = engine_of(source)
        self.model_name, self.device_map = self.engine.model.name, self.device_map or "cpu"
        if was_given:  # "auto" may load it in another one, under which there are no caches
            self.dtype = self.engine.model.dtype_name
        self.kv_dir, self.store_bits = folder_of(self.engine), self.engine.store_bits
        self.kv_remote = remote_of(self.engine)
        self.namespace = self.engine.store.namespace
        method, eviction = own_choices(self.engine)
        self.method, self.eviction = self.method or method, self.eviction or eviction

    # -- one engine, however often a framework copies its components ----------------------------

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        if "engine" in self.__dict__:  # what came out of a pickle has none
            memo[id(self.engine)] = self.engine
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[Any, Any]:
        without = self.model_copy()  # frameworks try to pickle every attribute, and delete some
        without.__dict__.pop("engine", None)
        return super(LocalLLM, without).__getstate__()

    if not TYPE_CHECKING:  # or every attribute would be known, and no argument

        def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
            if args:
                name = "engine" if isinstance(args[0], Engine) else "model"
                raise InvalidOption(
                    f"{type(self).__name__}({args[0]!r}); arguments need their names, give "
                    f"{name}={args[0]!r}"
                )
            super().__init__(**kwargs)

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401
            if name == "engine":
                return EngineRef().engine  # raises: it stayed behind
            return super().__getattr__(name)

    # -- what frameworks ask of an LLM ----------------------------------------------------------

    @property
    def last_report(self) -> Report | None:
        """What the answer that was finished last cost; None before the first."""
        return self._last_report

    def _n_tokens(self, text: str) -> int:
        """Tokens of a part of a prompt, handles at the length of their chunks, without BOS."""
        if not text:
            return 0
        return self.engine.count_tokens(RenderedPrompt(text, is_chat=True))

    def _require_room(self, context_window: int, **max_tokens: int) -> None:
        """Raises InvalidOption for a wrong window or stop id, or if no prompt has room.

        max_tokens: most tokens of an answer, under the name that the framework has for it.
        """
        model = self.engine.model
        if not 0 < context_window <= model.context_window:
            raise InvalidOption(
                f"context_window={context_window}; {model.name!r} has {model.context_window}, give "
                "1 to that, or None for all of it"
            )
        model.end_ids(self.stopping_ids)
        for name, number in max_tokens.items():
            if number >= context_window:
                raise InvalidOption(
                    f"{name}={number} leaves no room for a prompt in the context window of "
                    f"{model.name!r}, {context_window} tokens; give less"
                )

    # -- calls ------------------------------------------------------------------------------

    def _options_of(
        self, call: Mapping[str, Any], always: Mapping[str, Any], max_new_tokens: int | None
    ) -> dict[str, Any]:
        """Keyword arguments of the engine beside the prompt, see `to_options`."""
        return {
            "chunks": None if self.match_text else (),
            "method": self.method,
            "eviction": self.eviction,
            "on_miss": self.on_miss,
            "stop_ids": self.stopping_ids,
            **to_options(call, always, max_new_tokens),
        }

    def _with_tools(self, prompt: Prompt, call: dict[str, Any]) -> tuple[Prompt, ToolUse | None]:
        """What is asked, and with which tools, which are taken out of the options of the call."""
        tools, choice = call.pop("tools", None), call.pop("tool_choice", None)
        if not tools or choice == "none":
            return prompt, None
        use = ToolUse.of(self.engine.model, tools, choice)
        if not isinstance(prompt, list):
            raise InvalidOption(
                "tools with messages_to_prompt; leave it out, for the chat template"
            )
        if use.json_schema is not None:
            call["json_schema"] = use.json_schema
        return Chat(prompt, use.tools), use
