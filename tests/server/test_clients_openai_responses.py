"""OpenAI's own client and ``/v1/responses``, against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.support.live_server import CHAT, KEY, MAX_TOKENS, QUESTION, LiveServer
from tests.support.load import from_caches
from tests.support.records import TEXTS

ASK: dict[str, Any] = {"model": "builtin", "input": QUESTION, "max_output_tokens": MAX_TOKENS}


_PART = {"type": "input_text", "text": "a"}


@pytest.fixture
def client(live: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=live.url, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(live: LiveServer) -> str:
    return live.answer(CHAT)


def check_reused(answer: Any) -> None:
    assert from_caches(answer.model_extra["samkv"]) == len(TEXTS)
    usage = answer.usage
    assert 0 < usage.input_tokens_details.cached_tokens < usage.input_tokens
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_a_question(client: OpenAI, expected: str) -> None:
    answer = client.responses.create(**ASK)
    assert (answer.output_text, answer.status) == (expected, "completed")
    check_reused(answer)


def test_instructions_are_a_system_message(client: OpenAI, live: LiveServer) -> None:
    answer = client.responses.create(**ASK, instructions="Answer in one word.")
    said = {"role": "system", "content": "Answer in one word."}
    assert answer.output_text == live.answer([said, *CHAT])


def test_a_cut_answer_says_so(client: OpenAI, live: LiveServer) -> None:
    answer = client.responses.create(**ASK | {"max_output_tokens": 1})
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output_text == live.answer(CHAT, max_new_tokens=1)


def test_a_stream(client: OpenAI, expected: str) -> None:
    events = list(client.responses.create(**ASK, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == expected
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == expected
    check_reused(events[-1].response)


def test_an_answer_is_sent_back_as_it_came(client: OpenAI, live: LiveServer) -> None:
    answer = client.responses.create(**ASK)
    part = {"type": "input_text", "text": "And who else?"}
    asked = {"type": None, "role": "user", "content": [part]}
    turns: list[Any] = [*CHAT, *answer.output, asked]
    second = client.responses.create(**ASK | {"input": turns})
    said = {"role": "assistant", "content": answer.output_text}
    last = {"role": "user", "content": "And who else?"}
    assert second.output_text == live.answer([*CHAT, said, last])


def test_what_asks_for_nothing_that_is_lacking_is_taken(client: OpenAI) -> None:
    marked = {"type": "input_text", "text": "Who?", "cache_control": {"type": "ephemeral"}}
    answer = client.responses.create(
        **ASK | {"input": [{"role": "user", "content": [marked]}]}, truncation="auto", store=True,
        include=["reasoning.encrypted_content"], reasoning={"effort": "none"},
        text={"verbosity": "medium"}, extra_body={"prompt_cache_retention": "24h", "top_k": -1},
    )  # fmt: skip
    assert answer.output_text


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"truncation": "always"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"input": []}, "input"),
        ({"extra_body": {"max_tokens": 2}}, "max_output_tokens"),
        (
            {"text": {"format": {"type": "json_object", "schema": {"type": "array"}}}},
            "text.format.schema",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"input": [{"role": "user", "content": [_PART | {"x": 1}]}]}, "input[0].content[0].x"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        (
            {
                "input": [
                    {"type": "reasoning"},
                    {"type": "function_call", "name": "f", "arguments": "[1]"},
                ]
            },
            "input[1].arguments",
        ),
        ({"input": [{"type": "function_call_output", "output": 7}]}, "input[0].output"),
        ({"input": [{"type": "reasoning"}]}, "input"),
    ],
)
def test_what_is_refused(client: OpenAI, more: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ASK | more)
    assert caught.value.param == param
