"""Calls of tools in the forms of chat templates: read, kept apart from text, and forced."""

from __future__ import annotations

import json
from typing import Any

import pytest

from samkv_integrations.errors import InvalidOption
from samkv_integrations.frameworks.tool_calls import ToolCall, ToolUse, form_of, turn_of
from samkv_integrations.prompt.quoting import Chat
from tests.support.models import tiny_model
from tests.support.records import builtin
from tests.support.tested_runtime import of_transformers_alone
from tests.support.tools import tool_model

TOWN = {
    "type": "function",
    "function": {
        "name": "find_town",
        "description": "Finds a town.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 8}},
            "required": ["name"],
        },
    },
}
DATE = {
    "type": "function",
    "function": {
        "name": "find_date",
        "description": "Finds a date.",
        "parameters": {
            "type": "object",
            "properties": {"when": {"$ref": "#/$defs/when"}},
            "required": ["when"],
            "$defs": {"when": {"enum": ["today", "never"]}},
        },
    },
}
CALL = '{"name": "find_town", "arguments": {"name": "Denbury"}}'


def use(form: str = "hermes", choice: object = None) -> ToolUse:
    return ToolUse.of(tool_model(form), [TOWN, DATE], choice)


def test_templates_that_take_none_or_have_another_form() -> None:
    with pytest.raises(InvalidOption, match="template of 'tiny-llama' takes no tools"):
        form_of(tiny_model())
    with pytest.raises(InvalidOption, match="template of 'tiny-unknown' takes tools, but"):
        form_of(tool_model("unknown"))
    assert builtin().tool_template is None


def test_the_prompt_tells_of_the_tools() -> None:
    """And the model reads calls and results of earlier turns."""
    called = {"id": "abcdefghi", "type": "function",
              "function": {"name": "find_town", "arguments": {"name": "Denbury"}}}  # fmt: skip
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "On the Tume.", "tool_call_id": "abcdefghi"},
    ]
    text = tool_model().render_chat(Chat(messages, [TOWN])).text
    assert json.dumps(TOWN["function"]["name"]) in text and "Finds a town." in text
    assert '<tool_call>"find_town"{"name": "Denbury"}</tool_call>' in text
    assert "RESULT OF abcdefghi: On the Tume." in text
    assert "find_town" not in tool_model().render_chat(messages[:1]).text
    for chat in (Chat(messages[:1], [TOWN]), Chat(messages)):
        with pytest.raises(InvalidOption, match="takes no tools and no calls of tools"):
            tiny_model().render_chat(chat)


@of_transformers_alone
def test_names_of_special_tokens_are_text_in_tools_and_what_they_return() -> None:
    """A document that a tool returns must not end the turn, nor must an argument's name."""
    name = "<|end|>"
    called = {"function": {"name": "find_town", "arguments": {name: name}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": name, "tool_call_id": name},
    ]
    described = {"type": "function", "function": {"name": "f", "parameters": {name: name}}}
    prompt = tool_model().render_chat(Chat(messages, [described]))
    assert len(prompt.quoted) == 6
    n_ends = tool_model().tokenize_prompt(prompt).count(tool_model().tokenizer.eos_token_id)
    assert n_ends == 4  # of the tools and of each message


@pytest.mark.parametrize(
    ("form", "answer", "text"),
    [
        ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", ""),
        ("hermes", f"I look.\n<tool_call>{CALL}</tool_call>\n", "I look."),
        ("hermes", f"<tool_call>{CALL}", ""),
        ("llama3", CALL.replace("arguments", "parameters"), ""),
        ("mistral", f" [{CALL}]", ""),
        ("mistral", f'[{CALL.replace("}}", "}, ")}"id": "abcdefghi"}}]', ""),
    ],
)
def test_one_call(form: str, answer: str, text: str) -> None:
    found = use(form).read(answer)
    assert found.text == text and not found.broken
    (call,) = found.calls
    assert (call.name, call.arguments) == ("find_town", {"name": "Denbury"})
    assert len(call.id) == 9 and call.id.isalnum()


def test_several_calls() -> None:
    twice = use().read(f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>").calls
    assert [call.name for call in twice] == ["find_town"] * 2
    assert twice[0].id != twice[1].id
    assert len(use("mistral").read(f"[{CALL}, {CALL}]").calls) == 2


@pytest.mark.parametrize("answer", [CALL, f"```json\n{CALL}\n```", f"[{CALL}]", f"{CALL}\n"])
def test_a_call_without_the_tags_that_the_template_asks_for(answer: str) -> None:
    """As Qwen2.5-Coder writes them."""
    (call,) = use().read(answer).calls
    assert (call.name, call.arguments) == ("find_town", {"name": "Denbury"})
    assert len(use().read(f"{CALL}\n{CALL}").calls) == 2


@pytest.mark.parametrize("form", ["hermes", "mistral"])
@pytest.mark.parametrize(
    "answer",
    [
        CALL.replace("find_town", "find_river"),
        CALL.replace('{"name": "Denbury"}', "3"),
        f"[{CALL}, 3]",
        CALL[:-5],
        f"```json\n{CALL[:-5]}",
    ],
)
def test_json_that_only_resembles_a_call(form: str, answer: str) -> None:
    found = use(form).read(answer)
    assert (found.text, found.calls, found.broken) == ("", (), (answer,))


def test_nesting_without_end() -> None:
    for answer in ("[" * 100_000, f"<tool_call>{'[' * 100_000}</tool_call>"):
        assert not use().read(answer).calls


def test_ids_of_other_servers_fit_every_template() -> None:
    """Mistral's template refuses others than nine letters and digits."""
    id = "call_yM7OzUnzrAbCdEfGhIjKlMnO"
    (called,) = turn_of("ai", "", calls=[ToolCall("f", {}, id)])["tool_calls"]
    assert called["id"] == turn_of("tool", "", call_id=id)["tool_call_id"]
    assert len(called["id"]) == 9 and called["id"].isalnum()
    assert turn_of("tool", "", call_id="yM7OzUnzr")["tool_call_id"] == "yM7OzUnzr"


@pytest.mark.parametrize("form", ["hermes", "llama3", "mistral"])
@pytest.mark.parametrize("answer", ["On the Tume.", '{"river": "Tume"}', "[1, 2]", "{not JSON", ""])
def test_what_is_no_call_is_text(form: str, answer: str) -> None:
    found = use(form).read(answer)
    assert (found.text, found.calls, found.broken) == (answer, (), ())


@pytest.mark.parametrize(
    "inside",
    [
        '{"name": "find_town", "argu',
        '{"arguments": {}}',
        '{"name": "find_town", "arguments": 3}',
        '{"name": "find_river", "arguments": {}}',
    ],
)
def test_a_broken_call_keeps_its_text_and_place(inside: str) -> None:
    broken = f"<tool_call>{inside}</tool_call>"
    found = use().read(f"I look. {broken}")
    assert (found.text, found.calls, found.broken) == ("I look.", (), (broken,))
    found = use().read(f"<tool_call>{CALL}</tool_call>I look. {broken} Done.")
    assert (found.full_text, len(found.calls)) == (f"I look. {broken} Done.", 1)


def test_the_name_of_a_tag_is_text() -> None:
    answer = "A call stands in <tool_call> and </tool_call>, `<tool_call>name</tool_call>`."
    found = use().read(answer)
    assert (found.full_text, found.calls, found.broken) == (answer, (), ())


@pytest.mark.parametrize("form", ["hermes", "llama3", "mistral"])
@pytest.mark.parametrize(
    "answer",
    [
        f"I look.\n<tool_call>{CALL}</tool_call>",
        "a < b and <tool",
        CALL,
        f"[{CALL}]",
        f"```json\n{CALL}\n```",
        "```python\nprint(1)\n```",
        "[1] Tume",
        "No.",
    ],
)
def test_what_a_stream_shows_is_the_beginning_of_the_text(form: str, answer: str) -> None:
    """Nothing of a call is ever shown, and nothing shown is taken back."""
    of = use(form)
    whole = of.read(answer).text
    shown = [of.shown(answer[:end]) for end in range(len(answer) + 1)]
    assert all(whole.startswith(text) for text in shown)
    assert [len(text) for text in shown] == sorted(len(text) for text in shown)
    if not answer.startswith(("{", "[", "```json")):
        assert shown[-1]


class TestForced:
    @pytest.mark.parametrize("choice", ["find_river", {"type": "any"}, 3])
    def test_what_is_no_choice(self, choice: object) -> None:
        with pytest.raises(
            InvalidOption, match="allowed: none, auto, any, required, or one of find_town"
        ):
            use(choice=choice)


def test_values_that_look_like_references_stay() -> None:
    """And properties may have the names of keywords."""
    data = {"$ref": "#/data"}
    schema = {
        "type": "object", "examples": [data],
        "properties": {
            "default": {"$ref": "#/$defs/when"},
            "enum": {"enum": [data, "x"], "default": data},
            "const": {"const": data},
        },
        "$defs": {"when": {"enum": ["today"]}},
    }  # fmt: skip
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    made = json.dumps(ToolUse.of(tool_model("hermes"), [tool], "required").json_schema)
    assert made.count('{"$ref": "#/data"}') == 4
    assert '"default": {"$ref": "#/$defs/tool0/$defs/when"}' in made


@pytest.mark.parametrize("choice", [0, 1, 1.0])
def test_numbers_are_no_choice_of_tools(choice: object) -> None:
    with pytest.raises(InvalidOption, match="tool_choice"):
        use(choice=choice)
