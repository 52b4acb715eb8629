"""What is taken of OpenAI's API, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import App

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}


def chat(**more: object) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Q?"}],
        "max_tokens": 2,
        **more,
    }


def text(**more: object) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "Q?", "max_tokens": 2, **more}


def says(*content: object) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": each} for each in content])


@pytest.mark.parametrize(
    "body",
    [
        chat(n=1, logprobs=False, top_logprobs=0, presence_penalty=0, frequency_penalty=0.0),
        chat(tools=[], tool_choice="none", user="u", metadata={"a": "b"}, store=False, stop=[]),
        chat(stop=None, temperature=None, tools=None, seed=None, stream_options=None, samkv=None),
        chat(response_format={"type": "text"}, service_tier="auto", modalities=["text"]),
        chat(temperature=1, top_p=1),
        says([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        chat(
            messages=[
                {"role": "developer", "content": "Be brief.", "name": None},
                {"role": "user", "content": "Q?", "name": "Ann"},
                {"role": "assistant", "content": "A.", "refusal": None, "tool_calls": None},
                {"role": "assistant", "content": None, "annotations": [], "audio": None,
                 "function_call": None, "tool_calls": [], "parsed": None},
                {"role": "user", "content": [{"type": "text", "text": "Q?", "annotations": []}]},
            ]
        ),
        chat(tool_choice="required"),
        chat(top_k=-1, temperature=2, store=True, reasoning_effort="none", verbosity="medium"),
        chat(prompt_cache_retention="24h"),
        says([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]),
        chat(messages=[{"role": "user", "content": "Q?", "cache_control": {"type": "ephemeral"}}]),
    ],
)  # fmt: skip
async def test_chats_that_are_taken(body: dict[str, Any], app: App) -> None:
    reply = await app.client.posted(CHAT, body)
    assert reply.status == 200, reply.text


@pytest.mark.parametrize("body", [text(best_of=1, echo=False, n=1), text(prompt=["Q?"])])
async def test_prompts_that_are_taken(body: dict[str, Any], app: App) -> None:
    reply = await app.client.posted(TEXT, body)
    assert reply.status == 200, reply.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (chat(n=2), "n"),
        (chat(n="1"), "n"),
        (chat(n=True), "n"),
        (chat(logprobs=True), "logprobs"),
        (chat(top_logprobs=3), "top_logprobs"),
        (chat(top_logprobs=False), "top_logprobs"),
        (chat(tools=[{"type": "function", "function": {"name": "f"}}]), "tools"),
        (chat(tools=[{"type": "custom", "custom": {"name": "f"}}]), "tools[0].type"),
        (chat(tools=[{"type": "function", "function": {}}]), "tools[0].function.name"),
        (chat(tools=[{"type": "function", "function": {"name": "f"}, "x": 1}]), "tools[0].x"),
        (chat(tool_choice="f"), "tool_choice"),
        (chat(functions=[]), "functions"),
        (chat(presence_penalty=0.5), "presence_penalty"),
        (chat(logit_bias={"50": 1.0}), "logit_bias"),
        (chat(modalities=["text", "audio"]), "modalities[1]"),
        (chat(reasoning_effort="high"), "reasoning_effort"),
        (chat(verbosity="low"), "verbosity"),
        (chat(tools=[TOOL], tool_choice=1), "tool_choice"),
        (chat(temperature=2.5), "temperature"),
        (chat(top_k=-2), "top_k"),
        (chat(prompt="Q?"), "prompt"),
        (chat(max_tokens=0), "max_tokens"),
        (chat(max_tokens=2.5), "max_tokens"),
        (chat(max_tokens=True), "max_tokens"),
        (chat(max_completion_tokens=3), "max_completion_tokens"),
        (chat(temperature="hot"), "temperature"),
        (chat(temperature=-0.5), "temperature"),
        (chat(top_p=7), "top_p"),
        (chat(seed=2**70), "seed"),
        (chat(stream="yes"), "stream"),
        (chat(stream_options={"include_usage": True}), "stream_options"),
        (chat(stream=True, stream_options={"include_use": True}), "stream_options.include_use"),
        (chat(stop=["a", ""]), "stop[1]"),
        (chat(stop=3), "stop"),
        (chat(samkv={"methode": "reuse"}), "samkv.methode"),
        (chat(samkv={"on_miss": "shrug"}), "samkv.on_miss"),
        (chat(response_format={"type": "xml"}), "response_format.type"),
        (chat(response_format={"type": "json_schema"}), "response_format.json_schema"),
        (chat(response_format={"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}),
         "response_format.json_schema.schema"),
        (chat(samkv={"method": "m"}), "samkv.method"),
        (chat(samkv={"timeout": -1}), "samkv.timeout"),
        (chat(max_tokens=10**9), "messages"),
        (chat(model=None), "model"),
        (chat(messages=[]), "messages"),
        (chat(messages="Q?"), "messages"),
        (chat(messages=[{"role": "user"}]), "messages[0].content"),
        (chat(messages=[{"role": "wizard", "content": ""}]), "messages[0].role"),
        (chat(messages=[{"role": "tool", "content": "", "tool_call_id": "1"}]), "messages"),
        (chat(messages=[{"role": "assistant", "function_call": {"name": "f"}}]),
         "messages[0].function_call"),
        (chat(messages=[{"role": "assistant", "audio": {"id": "a"}}]), "messages[0].audio"),
        (chat(messages=[{"role": "user", "content": "", "tool_calls": [CALL]}]),
         "messages[0].tool_calls"),
        (chat(messages=[{"role": "user", "content": "", "tool_call_id": "a"}]),
         "messages[0].tool_call_id"),
        (chat(messages=[{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f",
         "arguments": "[1]"}}]}]), "messages[0].tool_calls[0].function.arguments"),
        (says([{"type": "text", "text": "a"}, IMAGE]), "messages[0].content[1].type"),
        (says("a", [{"type": "text"}]), "messages[1].content[0].text"),
        (says([{"type": "text", "text": 3}]), "messages[0].content[0].text"),
        (says([{"type": "text", "text": "a", "x": 1}]), "messages[0].content[0].x"),
        (says(["text"]), "messages[0].content[0]"),
        (says(7), "messages[0].content"),
        ([chat()], None),
        ("chat", None),
        (7, None),
    ],
)  # fmt: skip
async def test_chats_that_are_refused(body: object, param: str | None, app: App) -> None:
    reply = await app.client.posted(CHAT, body)
    assert reply.status == 400, reply.text
    assert reply.error["param"] == param
    assert reply.error["type"] == "invalid_request_error"
    too_long = reply.error["code"] == "context_length_exceeded"
    assert too_long or (param or "").rpartition(".")[2] in reply.error["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (chat(presence_penalty=0.5), "presence_penalty=0.5: only 0 is supported here"),
        (chat(n=2), "n=2: only 1 is supported here"),
        (says([IMAGE]), "messages[0].content[0].type='image_url': only 'text' is supported"),
        (says({"a": 1}), "messages[0].content={'a': 1}: it must be a string or a list of text"),
        (chat(tools=["f"]), "tools[0]='f': it must be an object"),
        (chat(max_tokens=0), "max_tokens=0: Input should be greater than or equal to 1"),
        (chat(seed="s"), "seed='s': Input should be a valid integer"),
        (chat(messages=[]), "messages is empty; give at least one"),
        (chat(stream_options={}), "stream_options={}: it needs stream=true"),
    ],
)
async def test_what_is_wrong_is_said(body: object, message: str, app: App) -> None:
    assert (await app.client.posted(CHAT, body)).error["message"].startswith(message)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (text(prompt=["a", "b"]), "prompt"),
        (text(prompt=[1, 2]), "prompt"),
        (text(prompt=None), "prompt"),
        (text(suffix="!"), "suffix"),
        (text(echo=True), "echo"),
        (text(best_of=3), "best_of"),
        (text(best_of=True), "best_of"),
        (text(logprobs=0), "logprobs"),
        (text(messages=[]), "messages"),
    ],
)
async def test_prompts_that_are_refused(body: object, param: str | None, app: App) -> None:
    reply = await app.client.posted(TEXT, body)
    assert (reply.status, reply.error["param"]) == (400, param), reply.text


@pytest.mark.parametrize(
    "sent",
    [b"", b"{", b"null", b"\xff\xfe", b'{"model": "tiny"', b"[" * 50_000, b'{"a":' * 10_000],
)
async def test_what_is_no_json(sent: bytes, app: App) -> None:
    reply = await app.client.posted(CHAT, sent)
    assert reply.status == 400, reply.text
    assert reply.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e400", "-Infinity"])
async def test_numbers_that_are_none(number: str, app: App) -> None:
    sent = json.dumps(text()).replace("}", f', "temperature": {number}}}').encode()
    reply = await app.client.posted(TEXT, sent)
    assert (reply.status, reply.error["param"]) == (400, "temperature"), reply.text


async def test_a_message_of_lone_surrogates(app: App) -> None:
    """JSON can write what no text is."""
    reply = await app.client.posted(TEXT, rb'{"model": "tiny", "prompt": "a\ud800b"}')
    assert reply.status == 400, reply.text
    assert reply.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": "x" * 50_000},
        {"y" * 50_000: 1},
        {"seed": int("9" * 4000)},
        {"samkv": {"method": "m" * 50_000}},
        {"stop": ["x" * 1000] * 40, "response_format": {"type": "json_object"}},
    ],
)
async def test_a_wrong_value_is_not_repeated_at_length(wrong: dict[str, Any], app: App) -> None:
    reply = await app.client.posted(CHAT, chat(**wrong))
    assert reply.status == 400
    assert len(reply.text) < 600


@pytest.mark.parametrize(
    "sent",
    [
        b"[" * 20_000,
        b'{"model": "\xff"}',
        b'{"seed": ' + b"9" * 5000 + b"}",
    ],
    ids=["deep", "no UTF-8", "long number"],
)
async def test_a_body_that_cannot_be_decoded(sent: bytes, make_app: Callable[..., App]) -> None:
    reply = await make_app(max_body_bytes=200_000).client.posted(CHAT, sent)
    assert (reply.status, reply.error["code"]) == (400, None), reply.text
    assert reply.error["message"].startswith("the body cannot be read")


async def test_a_part_whose_type_is_half_a_character(app: App) -> None:
    body = rb'{"model": "tiny", "messages": [{"role": "user", "content": [{"type": "\ud800"}]}]}'
    reply = await app.client.posted(CHAT, body)
    assert (reply.status, reply.error["param"]) == (400, "messages[0].content[0].type"), reply.text
    assert r"\ud800" in reply.error["message"]


async def test_a_schema_of_half_a_character(app: App) -> None:
    form = rb'{"type": "json_schema", "json_schema": {"schema": {"const": "\ud800"}}}'
    turns = rb'[{"role": "user", "content": "Q?"}]'
    body = rb'{"model": "tiny", "messages": ' + turns + rb', "response_format": ' + form + b"}"
    reply = await app.client.posted(CHAT, body)
    assert reply.status == 400, reply.text


@pytest.mark.parametrize("stop", [["x"] * 65, ["x" * 1025]], ids=["many", "long"])
async def test_stop_strings_that_hold_others_up(stop: list[str], app: App) -> None:
    reply = await app.client.posted(CHAT, chat(stop=stop))
    assert (reply.status, reply.error["code"]) == (400, "invalid_value"), reply.text


async def test_a_path_with_a_slash_too_many(app: App) -> None:
    for path in (f"{CHAT}/", "/chat/completions", "/chat/completions/"):
        reply = await app.client.posted(path, chat())
        assert (reply.status, reply.error["code"]) == (404, "not_found"), reply.text
        assert reply.error["message"].endswith(f"send it to {CHAT}")
    reply = await app.client.posted("/v1/audio", chat())
    assert reply.error["message"].endswith("/openapi.json lists all paths")


async def test_a_method_that_a_path_does_not_have(app: App) -> None:
    reply = await app.client.begin("PUT", CHAT, [b""]).end()
    assert (reply.status, reply.error["code"]) == (405, "method_not_allowed"), reply.text


async def test_a_timeout_of_the_client_is_at_most_the_servers(make_app: Callable[..., App]) -> None:
    for given, ours in ((1e-6, None), (1e-6, 60.0), (60.0, 1e-6)):
        reply = await make_app(timeout_s=ours).client.posted(CHAT, chat(samkv={"timeout": given}))
        assert (reply.status, reply.error["code"]) == (504, "timeout"), reply.text


async def test_arguments_of_a_call_that_are_too_long(make_app: Callable[..., App]) -> None:
    """They are JSON within a string, whose parts the limit of bodies does not see."""
    long = CALL | {"function": {"name": "f", "arguments": "[" * 500_001}}
    body = chat(messages=[{"role": "assistant", "tool_calls": [long]}])
    reply = await make_app(max_body_bytes=1_000_000).client.posted(CHAT, body)
    assert (reply.status, reply.error["param"]) == (
        400, "messages[0].tool_calls[0].function.arguments",
    )  # fmt: skip
