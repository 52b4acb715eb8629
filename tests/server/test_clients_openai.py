"""OpenAI's own client against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionChunk

from samkv_integrations.engine.scheduler import Limits
from tests.support.live_server import (
    CHAT,
    COMPLETION,
    KEY,
    MAX_TOKENS,
    QUESTION,
    LiveServer,
    live_server,
)
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
    assert report["reused"] == len(TEXTS)
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_chat(client: OpenAI, expected: str) -> None:
    answer = client.chat.completions.create(**ASK)
    assert answer.choices[0].message.content == expected
    assert expected.strip() == RECORDS[2].workers
    assert answer.choices[0].finish_reason == "stop"
    check_reused(answer.usage, report_of(answer))


def test_a_completion(client: OpenAI, live: LiveServer) -> None:
    answer = client.completions.create(model="builtin", prompt=COMPLETION, max_tokens=MAX_TOKENS)
    assert answer.choices[0].text == live.answer(COMPLETION)
    check_reused(answer.usage, report_of(answer))


def text_of(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_a_streamed_chat(client: OpenAI, expected: str) -> None:
    chunks = list(client.chat.completions.create(**ASK, stream=True))
    assert text_of(chunks) == expected
    assert [c.choices[0].finish_reason for c in chunks][-2:] == [None, "stop"]
    assert all(chunk.usage is None for chunk in chunks)
    assert report_of(chunks[-1])["reused"] == len(TEXTS)


def test_a_streamed_chat_with_usage(client: OpenAI, expected: str) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(**ASK, **options)
    assert text_of(chunks) == expected
    assert last.choices == []
    check_reused(last.usage, report_of(last))


def test_a_streamed_completion(client: OpenAI, live: LiveServer) -> None:
    stream = client.completions.create(
        model="builtin", prompt=COMPLETION, max_tokens=MAX_TOKENS, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == live.answer(COMPLETION)


def test_the_helper_that_gathers_a_stream(client: OpenAI, expected: str) -> None:
    with client.chat.completions.stream(**ASK) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        answer = stream.get_final_completion()
    assert "".join(deltas) == answer.choices[0].message.content == expected


async def test_asynchronous_chats_at_once(live: LiveServer, expected: str) -> None:
    async with AsyncOpenAI(base_url=live.url, api_key=KEY, max_retries=0) as client:
        asking = [client.chat.completions.create(**ASK) for _ in range(4)]
        stream = await client.chat.completions.create(**ASK, stream=True)
        answers = await asyncio.gather(*asking)
        assert text_of([chunk async for chunk in stream]) == expected
    for answer in answers:
        assert answer.choices[0].message.content == expected
        check_reused(answer.usage, report_of(answer))


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


def test_what_changes_no_answer_is_taken(client: OpenAI, expected: str) -> None:
    part = {"type": "text", "text": CHAT[0]["content"], "cache_control": None}
    answer = client.chat.completions.create(
        **ASK | {"messages": [{"role": "user", "content": [part]}]},
        n=1, user="u", metadata={"a": "b"}, store=False, stop=None, seed=None, logit_bias={},
        safety_identifier="s", prompt_cache_key="k", service_tier="auto", tools=[],
        presence_penalty=0, frequency_penalty=0, logprobs=False, parallel_tool_calls=False,
    )  # fmt: skip
    assert answer.choices[0].message.content == expected


def test_options_of_ours(client: OpenAI, live: LiveServer) -> None:
    answer = client.chat.completions.create(**ASK, extra_body={"samkv": {"method": "recompute"}})
    assert report_of(answer)["method"] == "recompute"
    answer = client.chat.completions.create(**ASK, extra_body={"samkv": {"method": "reuse"}})
    assert answer.choices[0].message.content == live.answer(CHAT, method="reuse")


def test_options_of_sampling(client: OpenAI, live: LiveServer) -> None:
    sampled = {"temperature": 1.5, "top_p": 0.9, "seed": 3}
    answer = client.chat.completions.create(**ASK, **sampled)
    assert answer.choices[0].message.content == live.answer(CHAT, **sampled)
    answer = client.chat.completions.create(**ASK, stop=["4"])
    assert answer.choices[0].message.content == live.answer(CHAT, stop=["4"])


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


def test_the_id_of_a_request(client: OpenAI) -> None:
    headers = {"x-request-id": "mine-1"}
    answer = client.chat.completions.with_raw_response.create(**ASK, extra_headers=headers)
    assert answer.headers["x-request-id"] == "mine-1"


@pytest.mark.parametrize("key", ["sk-of-somebody-else-1", "x"])
def test_a_wrong_key(live: LiveServer, key: str) -> None:
    with client_of(live, key) as client, pytest.raises(openai.AuthenticationError) as caught:
        client.chat.completions.create(**ASK)
    assert caught.value.code == "invalid_api_key"
    assert key not in str(caught.value)


def test_another_model(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(**ASK | {"model": "gpt-4o"})
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert "known: 'builtin'" in caught.value.message


def test_a_prompt_that_is_too_long(client: OpenAI) -> None:
    long = [{"role": "user", "content": QUESTION * 20}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASK | {"messages": long})
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("more", [{"n": 2}, {"logprobs": True}, {"functions": [{"name": "f"}]}])
def test_what_is_not_supported(client: OpenAI, more: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASK, **more)
    assert caught.value.param == next(iter(more))
    assert caught.value.type == "invalid_request_error"


def test_nothing_there(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="openapi.json"):
        client.embeddings.create(model="builtin", input="text")


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


def test_a_retry_is_answered_once_there_is_room(tmp_path: Path, steps: Steps) -> None:
    """The client waits as long as it is told to, by itself."""
    limits = Limits(max_batch=1, max_waiting=0)
    with live_server(tmp_path, limits=limits) as server, client_of(server) as client:
        steps.hold()
        running = client.chat.completions.create(**ASK, stream=True)
        hearing = client.with_options(max_retries=20, http_client=_ReleasingClient(steps))
        answer = hearing.chat.completions.create(**ASK)
        assert text_of(list(running)) == answer.choices[0].message.content


class _ReleasingClient(openai.DefaultHttpxClient):
    """Lets held steps begin when it has been told to come back later."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self._steps = steps

    def send(self, *args: Any, **kwargs: Any) -> Any:
        response = super().send(*args, **kwargs)
        if response.status_code == 429:
            self._steps.release()
        return response
