"""Tools that a model may call: which forms of calls are read, and how one is forced."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samkv_integrations.errors import InvalidOption
from samkv_integrations.model.model import Model

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
class BrokenCall:
    """What was to be a call, to the letter with its tags, and what is wrong with it."""

    text: str
    reason: str


@dataclass(frozen=True)
class ToolAnswer:
    """An answer apart: text, calls, and what cannot be read as one."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    broken: tuple[BrokenCall, ...] = ()


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
        names = tuple(str(tool["function"]["name"]) for tool in tools)
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
        # Each tool's schema goes on at a place of its own, and its references with it.
        parameters = {
            f"tool{number}": _moved(functions[name].get("parameters") or {}, f"tool{number}")
            for number, name in enumerate(self.forced)
        }
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    self.form.arguments: {"$ref": f"#/$defs/tool{number}"},
                },
                "required": ["name", self.form.arguments],
            }
            for number, name in enumerate(self.forced)
        ]
        return {"anyOf": calls, "$defs": parameters}

    def read(self, text: str) -> ToolAnswer:
        """The calls of a whole answer, and the text beside them."""
        if self.form.tagged and not self.forced:
            found = [self._call(match[1], match[0]) for match in _TAGGED.finditer(text)]
            beside = _TAGGED.sub("", text)
            return _apart(beside.rstrip() if found else text, found)
        return self._bare(text) if _may_be_json(text) else ToolAnswer(text)

    def shown(self, text: str) -> str:
        """As much of an unfinished answer as is text beside calls for certain."""
        if self.form.tagged and not self.forced:
            before = text.partition(_OPEN)[0]
            held = max((n for n in range(1, len(_OPEN)) if before.endswith(_OPEN[:n])), default=0)
            return before[: len(before) - held].rstrip()
        return "" if self.forced or not text.strip() or _may_be_json(text) else text

    def _bare(self, text: str) -> ToolAnswer:
        try:
            value, end = json.JSONDecoder().raw_decode(text.strip())
        except ValueError:
            return ToolAnswer(text)
        values = value if isinstance(value, list) else [value]
        found = [self._call(json.dumps(each), "") for each in values]
        if not found or any(isinstance(call, BrokenCall) for call in found):
            return ToolAnswer(text)
        return _apart(text.strip()[end:].strip(), found)

    def _call(self, text: str, whole: str) -> ToolCall | BrokenCall:
        """The call that ``text`` is the JSON of; whole: the same with its tags."""
        try:
            call = json.loads(text)
            name, arguments = call["name"], call.get(self.form.arguments, {})
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            return BrokenCall(whole, f"no JSON of a call, or cut before its end: {error!r}")
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return BrokenCall(whole, f"its name is no string, or {self.form.arguments} no object")
        letters = (secrets.choice(_ID_LETTERS) for _ in range(9))
        return ToolCall(name, arguments, "".join(letters))


def _may_be_json(text: str) -> bool:
    return text.lstrip()[:1] in ("{", "[")


def _apart(text: str, found: Sequence[ToolCall | BrokenCall]) -> ToolAnswer:
    return ToolAnswer(
        text,
        tuple(call for call in found if isinstance(call, ToolCall)),
        tuple(call for call in found if isinstance(call, BrokenCall)),
    )


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
