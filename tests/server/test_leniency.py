"""A lenient server: what it ignores, how it says so, and what it refuses all the same."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import App

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HEADER = "x-samkv-ignored"


@pytest.fixture
def lenient(make_app: Callable[..., App]) -> App:
    return make_app(is_lenient=True)


def said(*turns: dict[str, Any], **more: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Q?"}, *turns]
    return {"model": "tiny", "messages": messages, "max_tokens": 2, **more}


def text(**more: object) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "Q?", "max_tokens": 2, **more}


def asked(**more: object) -> dict[str, Any]:
    return {"model": "tiny", "input": "Q?", "max_output_tokens": 2, **more}


IGNORED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, said(prediction={"type": "content"}, mirostat=2), "prediction, mirostat"),
    (CHAT, said(presence_penalty=0.5, frequency_penalty=1), "presence_penalty, frequency_penalty"),
    (CHAT, said(reasoning_effort="high", verbosity="low", service_tier="flex"),
     "service_tier, reasoning_effort, verbosity"),
    (CHAT, said({"role": "assistant", "content": "A.", "reasoning_content": "hm"}, thinking={}),
     "messages[].reasoning_content, thinking"),
    (CHAT, said({"role": "user", "content": [{"type": "text", "text": "a", "id": 1}]}),
     "messages[].content[].id"),
    (CHAT, said(**{"x\r\ny: z": 1, "é": 2}), "x??y??z, ?"),
    (TEXT, text(mirostat=2), "mirostat"),
    (RESPONSES, asked(reasoning={"effort": "low", "summary": "auto"}, text={"verbosity": "low"}),
     "text.verbosity, reasoning.effort, reasoning.summary"),
    (RESPONSES, asked(input=[{"role": "user", "content": "a", "x": 1}], max_tool_calls=3),
     "input[].x, max_tool_calls"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "named"), IGNORED)
async def test_what_is_ignored_is_named(
    path: str, body: dict[str, Any], named: str, make_app: Callable[..., App]
) -> None:
    reply = await make_app(is_lenient=True).client.posted(path, body)
    assert reply.status == 200, reply.text
    assert reply.headers[HEADER] == named
    assert (await make_app().client.posted(path, body)).status == 400  # off by default


async def test_an_answer_is_that_without_the_field(lenient: App) -> None:
    with_field = await lenient.client.posted(CHAT, said(top_a=0.2))
    without = await lenient.client.posted(CHAT, said())
    assert HEADER not in without.headers
    one, other = (json.loads(each.text)["choices"] for each in (with_field, without))
    assert one == other


async def test_a_stream_names_it_too(lenient: App, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        reply = await lenient.client.posted(CHAT, said(stream=True, top_a=0.2))
    assert reply.headers[HEADER] == "top_a" and "[DONE]" in reply.text
    assert "ignored: top_a" in caplog.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, said(n=2), "n"),
        (CHAT, said(logprobs=True, top_a=1), "logprobs"),
        (CHAT, said(logit_bias={"5": -100}), "logit_bias"),
        (CHAT, said(functions=[]), "functions"),
        (CHAT, said(guided_json={}), "guided_json"),
        (CHAT, said(prompt="Q?"), "prompt"),
        (CHAT, said(system="Be brief."), "system"),
        (CHAT, said(stop_sequences=["."]), "stop_sequences"),
        (CHAT, said(extra_body={"guided_json": {}}), "extra_body"),
        (CHAT, said(temperature="hot"), "temperature"),
        (CHAT, said(samkv={"methode": "reuse"}), "samkv.methode"),
        (CHAT, said({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}),
         "messages[1].content[0].type"),
        (CHAT, said({"role": "assistant", "audio": {"id": "a"}}), "messages[1].audio"),
        (CHAT, said(tools=[{"type": "web_search"}]), "tools[0].type"),
        (TEXT, text(suffix="!"), "suffix"),
        (TEXT, text(logprobs=1), "logprobs"),
        (TEXT, text(echo=True), "echo"),
        (RESPONSES, asked(previous_response_id="resp_1"), "previous_response_id"),
        (RESPONSES, asked(include=["message.output_text.logprobs"]), "include[0]"),
    ],
)  # fmt: skip
async def test_what_an_answer_depends_on_is_refused(
    path: str, body: dict[str, Any], param: str, lenient: App
) -> None:
    reply = await lenient.client.posted(path, body)
    assert (reply.status, reply.error["param"]) == (400, param), reply.text


async def test_many_turns_with_a_field_are_one_name(lenient: App) -> None:
    turns = [{"role": "user", "content": "a", "id": n} for n in range(100)]
    reply = await lenient.client.posted(CHAT, said(*turns))
    assert (reply.status, reply.headers[HEADER]) == (200, "messages[].id")


async def test_fields_without_end_are_refused(lenient: App) -> None:
    turns = [{"role": "user", "content": "a", f"x{n}": n} for n in range(100)]
    reply = await lenient.client.posted(CHAT, said(*turns))
    assert (reply.status, reply.error["code"]) == (400, "unsupported_parameter"), reply.text


async def test_a_header_names_a_few(lenient: App) -> None:
    reply = await lenient.client.posted(CHAT, said(**{f"x{n}": n for n in range(100)}))
    assert reply.status == 200, reply.text
    assert reply.headers[HEADER].endswith("x15, and 84 more")
