"""Tool calls of a chat model: their format, their JSON schema, their parsing; and chat turns.

Tools are described in OpenAI's form, which both frameworks convert theirs to.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import string
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from samkv_integrations.errors import Given, InvalidOption
from samkv_integrations.prompt.quoting import Chat
from samkv_integrations.prompt.reader import Prompt
from samkv_integrations.runtimes.base import Runtime

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAGGED = re.compile(rf"{_OPEN}(\s*[{{\[].*?)(?:{_CLOSE}|$)", re.DOTALL)
_FENCE = "```json"
_FENCED = re.compile(f"{_FENCE}(.*?)(?:```)?", re.DOTALL)
_ID_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolForm:
    """How a model writes calls in an answer.

    arguments: the key of the arguments, beside ``name``.
    tagged: whether each call may stand in ``<tool_call>`` tags, with or without text around it.
        Without tags the whole answer is calls in JSON, or text: Qwen2.5-Coder writes no tags though
        its template asks for them.
    """

    arguments: str
    tagged: bool


@dataclass(frozen=True)
class ToolCall:
    """A call that can be made. id: nine letters and digits, which every chat template accepts."""

    name: str
    arguments: dict[str, Any]
    id: str


@dataclass(frozen=True)
class ToolAnswer:
    """The parts of an answer.

    full_text: without the calls. broken: parts of it that resemble calls but cannot be made, such
    as calls of tools that the request does not have.
    """

    full_text: str
    calls: tuple[ToolCall, ...] = ()
    broken: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The text without what is broken."""
        text = self.full_text
        for part in self.broken:
            text = text.replace(part, "", 1).rstrip()
        return text


def form_of(model: Runtime) -> ToolForm:
    """The form that the model's chat template asks for.

    Raises InvalidOption if the template takes no tools, or writes calls in an unknown form.
    """
    template = model.tool_template
    if template is None:
        raise InvalidOption(
            Given("tools", ...),
            f": the chat template of {model.name!r} takes no tools; retrieve in the "
            "chain, or use a model whose template does",
        )
    if _OPEN in template and "<function=" not in template and "<arg_key>" not in template:
        return ToolForm("arguments", tagged=True)  # Hermes, Qwen2.5, Qwen3
    if '"parameters": dictionary of argument name' in template:
        return ToolForm("parameters", tagged=False)  # Llama 3.1 to 3.3
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template:
        return ToolForm("arguments", tagged=False)  # Mistral
    raise InvalidOption(
        Given("tools", ...),
        f": the chat template of {model.name!r} takes tools, but writes calls in an "
        "unsupported format; supported: Hermes and Qwen (<tool_call>), Llama 3, Mistral "
        "([TOOL_CALLS])",
    )


def takes_tools(model: Runtime) -> bool:
    """Whether the model can be given tools: `form_of` has an answer."""
    try:
        form_of(model)
    except InvalidOption:
        return False
    return True


@dataclass(frozen=True)
class ToolUse:
    """The tools of one request, in OpenAI's form.

    forced: names of tools, one of which the answer must call. A forced answer is one call without
        tags or text, and conforms to the tool's schema.
    """

    tools: tuple[Mapping[str, Any], ...]
    form: ToolForm
    forced: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: Runtime, tools: Sequence[Mapping[str, Any]], choice: object) -> ToolUse:
        """The tools, and which must be called.

        choice: None or ``auto``; ``any``, ``required`` or True; or a name, also in OpenAI's forms.

        Raises InvalidOption for any other choice, and as `form_of` does.
        """
        try:
            names = tuple(str(tool["function"]["name"]) for tool in tools)
        except (TypeError, KeyError) as error:
            raise InvalidOption(
                Given("tools", tools),
                "; give a list of tools, each a mapping with 'function', which has a 'name'",
            ) from error
        if isinstance(choice, Mapping):
            function = choice.get("function", choice)
            choice = function.get("name", choice) if isinstance(function, Mapping) else choice
        if choice is None or choice is False or choice == "auto":  # 0 and 1 equal booleans
            forced: tuple[str, ...] = ()
        elif choice is True or choice in ("any", "required"):
            forced = names
        elif choice in names:
            forced = (str(choice),)
        else:
            raise InvalidOption(
                Given("tool_choice", choice),
                f"; allowed: none, auto, any, required, or one of {', '.join(names):.200}",
            )
        return cls(tuple(tools), form_of(model), forced)

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """The JSON schema of a forced answer; None for an answer that may be text."""
        if not self.forced:
            return None
        functions = {tool["function"]["name"]: tool["function"] for tool in self.tools}
        calls, parameters = [], {}
        for number, name in enumerate(self.forced):
            # Each tool's schema moves below $defs, so its references are rewritten.
            place, schema = f"tool{number}", functions[name].get("parameters") or {}
            parameters[place] = _moved(schema, place)
            properties = {
                "name": {"const": name},
                self.form.arguments: {"$ref": f"#/$defs/{place}"},
            }
            calls.append({"type": "object", "properties": properties, "required": list(properties)})
        return {"anyOf": calls, "$defs": parameters}

    def read(self, text: str) -> ToolAnswer:
        """The parts of a complete answer."""
        if self.form.tagged and not self.forced:
            calls, broken = list[ToolCall](), list[str]()

            def without_call(match: re.Match[str]) -> str:
                if (call := self._call(_json(match[1]))) is None:
                    broken.append(match[0])
                    return match[0]
                calls.append(call)
                return ""

            full_text = _TAGGED.sub(without_call, text)
            if calls or broken:
                return ToolAnswer(full_text.rstrip(), tuple(calls), tuple(broken))
        return self._untagged(text)

    def _untagged(self, text: str) -> ToolAnswer:
        """The parts of an answer without tags."""
        body = text.strip()
        if fenced := _FENCED.fullmatch(body):
            body = fenced[1].strip()
        values, rest = list[Any](), body
        with suppress(ValueError, RecursionError):
            while rest.startswith(("{", "[")):
                value, end = json.JSONDecoder().raw_decode(rest)
                values += value if isinstance(value, list) else [value]
                rest = rest[end:].lstrip()
        calls = [call for value in values if (call := self._call(value))]
        if calls and len(calls) == len(values):
            return ToolAnswer(rest, tuple(calls))
        keys = ('"name"', f'"{self.form.arguments}"')
        resembles = body.startswith(("{", "[")) and all(key in body for key in keys)
        return ToolAnswer(text, broken=(text,) if resembles or self.forced else ())

    def shown(self, text: str) -> str:
        """The part of an incomplete answer that can be shown: it cannot belong to a tool call."""
        start = text.lstrip()
        if self.forced or start.startswith(("{", "[", _FENCE)) or _FENCE.startswith(start):
            return ""
        if not self.form.tagged:
            return text
        before = text.partition(_OPEN)[0]
        n_of_tag = max((n for n in range(1, len(_OPEN)) if before.endswith(_OPEN[:n])), default=0)
        return before[: len(before) - n_of_tag].rstrip()

    def _call(self, value: object) -> ToolCall | None:
        """The call that a JSON value describes; None if it describes none of these tools."""
        if not isinstance(value, Mapping):
            return None
        name, arguments = value.get("name"), value.get(self.form.arguments, {})
        arguments = _json(arguments) if isinstance(arguments, str) else arguments
        names = [tool["function"]["name"] for tool in self.tools]
        if name not in names or not isinstance(arguments, dict):
            return None
        letters = (secrets.choice(_ID_LETTERS) for _ in range(9))
        return ToolCall(str(name), arguments, "".join(letters))


def _json(text: str) -> object:
    """The value of a text that a model wrote; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def with_tools(
    model: Runtime, prompt: Prompt, options: dict[str, Any]
) -> tuple[Prompt, ToolUse | None]:
    """The prompt with its tools, which are removed from the options of the call.

    Where a call is required, ``json_schema`` of the options becomes that of the call.
    """
    tools, choice = options.pop("tools", None), options.pop("tool_choice", None)
    if not tools or choice == "none":
        return prompt, None
    use = ToolUse.of(model, tools, choice)
    if not isinstance(prompt, list):
        raise InvalidOption("tools with messages_to_prompt; leave it out, for the chat template")
    if use.json_schema is not None:
        options["json_schema"] = use.json_schema
    return Chat(prompt, use.tools), use


def parts_of(text: str, use: ToolUse | None) -> ToolAnswer:
    """The parts of a complete answer; without tools it is text."""
    return ToolAnswer(text) if use is None else use.read(text)


class ShownText:
    """Streams the text of an answer, and holds back what may be a call of a tool.

    use: the tools of the request; None shows all text at once. text: the text shown so far.
    """

    def __init__(self, use: ToolUse | None) -> None:
        self._use = use
        self._text = self.text = ""

    def push(self, delta: str) -> str:
        """Take the next piece of the answer; returns the text that can be shown now."""
        self._text += delta
        text = self._text if self._use is None else self._use.shown(self._text)
        piece = text[len(self.text) :]
        self.text += piece
        return piece

    def rest(self) -> tuple[str, ToolAnswer]:
        """The text that was held back, and the parts of the complete answer."""
        found = parts_of(self._text, self._use)
        return found.text[len(self.text) :], found


def _moved(schema: Any, name: str) -> Any:  # noqa: ANN401
    """The schema with its references rewritten for the place ``#/$defs/name``."""
    if isinstance(schema, list):
        return [_moved(item, name) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = dict[str, Any]()
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = f"#/$defs/{name}{value[1:]}"
        elif key in _OF_VALUES:
            moved[key] = value
        elif key in _OF_NAMES and isinstance(value, Mapping):
            moved[key] = {each: _moved(schema_of, name) for each, schema_of in value.items()}
        else:
            moved[key] = _moved(value, name)
    return moved


_OF_VALUES = ("const", "enum", "default", "examples")
"""Keywords of JSON Schema that hold values, which are no schemas."""
_OF_NAMES = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords that hold a schema for each name; a name may be that of a keyword."""


# -- turns of a chat -------------------------------------------------------------------------------


def merged(turns: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns for a chat template, which expects roles to alternate: adjacent ones are joined.

    Calls and results of tools stay apart, because a template pairs them.
    """
    found: list[dict[str, Any]] = []
    for turn in turns:
        last = found[-1] if found else {}
        if turn.keys() == last.keys() == {"role", "content"} and turn["role"] == last["role"]:
            last["content"] += f"\n\n{turn['content']}"
        else:
            found.append(dict(turn))
    return found


_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "ai", "chatbot", "model"), "assistant"),
    "tool": "tool",
}
"""Role of a message, in both frameworks' and OpenAI's words -> role of a turn."""


def turn_of(
    role: str, text: str, *, calls: Iterable[ToolCall] = (), call_id: str = "",
    name: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The turn of a chat template. calls: of an assistant. call_id, name: of a tool's result.

    Raises InvalidOption for an unknown role.
    """
    if (known := _ROLES.get(role)) is None:
        raise InvalidOption(
            f"role {role!r} of a message is not supported; put its text into a message of one "
            f"that is: {', '.join(sorted(_ROLES))}"
        )
    turn: dict[str, Any] = {"role": known, "content": text}
    if known == "tool":
        turn["tool_call_id"] = _short(call_id)
        if name:
            turn["name"] = name
    elif known == "assistant":
        written = [
            {
                "id": _short(call.id), "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]  # fmt: skip
        if written:
            turn["tool_calls"] = written
    return turn


def arguments_of(given: object) -> dict[str, Any]:
    """The arguments of a call, also from JSON. Raises InvalidOption unless they are an object."""
    found = _json(given or "{}") if isinstance(given, str) else given
    if not isinstance(found, dict):
        raise InvalidOption(Given("arguments", given), " of a call; they must be an object")
    return found


def _short(call_id: str) -> str:
    """The id of a call as nine letters and digits, since Mistral's templates accept no other."""
    if len(call_id) == 9 and set(call_id) <= set(_ID_LETTERS):
        return call_id
    return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:9]
