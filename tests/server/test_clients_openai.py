"""OpenAI's own client against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionChunk

from samkv_integrations.serving.turns import Limits
from tests.support.live_server import (
    CHAT,
    KEY,
    MAX_TOKENS,
    LiveServer,
    live_server,
)
from tests.support.load import from_caches
from tests.support.records import RECORDS, TEXTS
from tests.support.steps import Steps

ASK: dict[str, Any] = {"model": "builtin", "messages": CHAT, "max_tokens": MAX_TOKENS}


def client_of(server: LiveServer, key: str = KEY) -> OpenAI:
    """A client that asks once, so that errors are those of the first try."""
    return OpenAI(base_url=server.url, api_key=key, max_retries=0)


@pytest.fixture
def client(live: LiveServer) -> Iterator[OpenAI]:
    with client_of(live) as client:
        yield client


@pytest.fixture(scope="module")
def expected(live: LiveServer) -> str:
    return live.answer(CHAT)


def report_of(answer: Any) -> dict[str, Any]:
    """The engine's report, which OpenAI's classes keep among what they do not know."""
    return dict(answer.model_extra["samkv"])


def check_reused(usage: Any, report: dict[str, Any]) -> None:
    assert from_caches(report) == len(TEXTS)
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_chat(client: OpenAI, expected: str) -> None:
    answer = client.chat.completions.create(**ASK)
    assert answer.choices[0].message.content == expected
    assert expected.strip() == RECORDS[2].workers
    assert answer.choices[0].finish_reason == "stop"
    check_reused(answer.usage, report_of(answer))


def text_of(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_a_streamed_chat(client: OpenAI, expected: str) -> None:
    plain = list(client.chat.completions.create(**ASK, stream=True))
    assert from_caches(report_of(plain[-1])) == len(TEXTS)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(**ASK, **options)
    assert text_of(chunks) == text_of(plain) == expected
    assert [c.choices[0].finish_reason for c in plain][-2:] == [None, "stop"]
    assert last.choices == [] and all(chunk.usage is None for chunk in plain)
    check_reused(last.usage, report_of(last))


def test_an_answer_is_sent_back_as_it_came(client: OpenAI, live: LiveServer) -> None:
    answer = client.chat.completions.create(**ASK).choices[0].message
    asked = {"role": "user", "content": "And who else?"}
    turns = [*CHAT, answer, asked]
    second = client.chat.completions.create(**ASK | {"messages": turns})
    said = {"role": "assistant", "content": answer.content or ""}
    assert second.choices[0].message.content == live.answer([*CHAT, said, asked])
    dumped = [*CHAT, answer.model_dump(), asked]  # with all its nulls
    third = client.chat.completions.create(**ASK | {"messages": dumped})
    assert third.choices[0].message.content == second.choices[0].message.content


def test_a_schema_is_kept_to(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"workers": {"type": "integer", "maximum": 9999}},
        "required": ["workers"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(**ASK | {"max_tokens": 40}, response_format=form)
    assert (answer.choices[0].message.content or "").replace(" ", "").startswith('{"workers":')


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == client.models.retrieve("builtin").id == "builtin"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


def test_too_many_at_once(tmp_path: Path, steps: Steps) -> None:
    limits = Limits(max_batch=1, max_waiting=0)
    with live_server(tmp_path, limits=limits) as server, client_of(server) as client:
        steps.hold()
        running = client.chat.completions.create(**ASK, stream=True)
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(**ASK)
        assert caught.value.code == "overloaded"
        assert int(caught.value.response.headers["retry-after"]) > 0
        steps.release()
        assert text_of(list(running)) == server.answer(CHAT)
