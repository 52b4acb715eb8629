"""Completions: the engine's own answers, in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import App
from tests.support.served import PROMPT, TEXTS
from tests.support.steps import Steps

TURN = {"role": "user", "content": PROMPT}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [TURN]},
}


@pytest.fixture(params=BODIES)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def body_of(path: str, **more: object) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 12, **BODIES[path], **more}


def expected(app: App, path: str, **options: object) -> str:
    prompt = PROMPT if path == "/v1/completions" else [TURN]
    return str(app.engine().generate(prompt, **{"max_new_tokens": 12, **options}).text)


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def piece_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["delta"].get("content", ""))


@pytest.fixture
def app(make_app: Callable[..., App]) -> App:
    app = make_app()
    app.engine().cache_chunks(TEXTS)
    return app


async def test_a_whole_answer(app: App, path: str) -> None:
    reply = await app.client.posted(path, body_of(path))
    (choice,), usage, report = (reply.body[name] for name in ("choices", "usage", "samkv"))
    assert reply.status == 200
    assert text_of(choice) == expected(app, path)
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    assert reply.body["object"] == ("text_completion" if "text" in choice else "chat.completion")
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    assert report["reused"] == 3
    assert report["model"] == reply.body["model"] == "tiny"
    chunk_tokens = report["context_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == chunk_tokens > 200


async def test_a_streamed_answer(app: App, path: str) -> None:
    whole = (await app.client.posted(path, body_of(path))).body
    reply = await app.client.posted(path, body_of(path, stream=True))
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-length" not in reply.headers
    events = reply.events
    assert "".join(piece_of(event["choices"][0]) for event in events) == text_of(
        whole["choices"][0]
    )
    assert len(events) > 3
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + ["length"]
    assert len({event["id"] for event in events}) == 1
    assert all("usage" not in event for event in events)
    assert [place for place, event in enumerate(events) if "samkv" in event] == [len(events) - 1]
    if path == "/v1/chat/completions":
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert {event["object"] for event in events} == {"chat.completion.chunk"}


async def test_a_stream_with_usage(app: App, path: str) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *events, last = (await app.client.posted(path, body_of(path, **options))).events
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == last["samkv"]["completion_tokens"] == 12
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert all("samkv" not in event for event in events)


async def test_options_reach_the_engine(app: App, path: str) -> None:
    sampled = {"temperature": 1.5, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 3}
    found = [
        text_of((await app.client.posted(path, body_of(path, **more))).body["choices"][0])
        for more in (sampled, sampled, sampled | {"seed": 4}, {"repetition_penalty": 1.4})
    ]
    assert found[0] == found[1] == expected(app, path, **sampled)
    assert found[2] == expected(app, path, **(sampled | {"seed": 4})) != found[0]
    assert found[3] == expected(app, path, repetition_penalty=1.4)


async def test_stop_strings(app: App, path: str) -> None:
    whole = expected(app, path)
    stop = next(letter for letter in whole[1:] if letter.isascii())
    for given in (stop, [stop], ["\0never", stop]):
        (choice,) = (await app.client.posted(path, body_of(path, stop=given))).body["choices"]
        assert text_of(choice) == whole[: whole.index(stop)]
        assert choice["finish_reason"] == "stop"


async def test_our_own_options(app: App, path: str) -> None:
    own = {"method": "recompute", "eviction": "h2o", "on_miss": "text"}
    report = (await app.client.posted(path, body_of(path, samkv=own))).body["samkv"]
    assert (report["method"], report["eviction"]) == ("recompute", "h2o")
    reply = await app.client.posted(path, body_of(path, samkv={"method": "reus"}))
    assert reply.status == 400
    assert "did you mean 'reuse'?" in reply.error["message"]


async def test_a_length_that_nobody_names(app: App, path: str) -> None:
    asked = {name: value for name, value in body_of(path).items() if name != "max_tokens"}
    assert (await app.client.posted(path, asked)).body["usage"]["completion_tokens"] == 6
    asked = (
        asked | {"max_completion_tokens": 4} if "messages" in asked else asked | {"max_tokens": 4}
    )
    assert (await app.client.posted(path, asked)).body["usage"]["completion_tokens"] == 4


async def test_a_prompt_that_leaves_little_room_is_answered_shortly(app: App) -> None:
    window = app.engine().model.context_window
    text = "a" * (window - app.engine().count_tokens("") - 2)
    n_room = window - app.engine().count_tokens(text)
    assert 0 < n_room < 6
    reply = await app.client.posted("/v1/completions", {"model": "tiny", "prompt": text})
    assert reply.body["usage"]["completion_tokens"] <= n_room


# -- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_option_out_of_range(app: App, path: str, is_streamed: bool) -> None:
    reply = await app.client.posted(path, body_of(path, temperature=-1, stream=is_streamed))
    assert (reply.status, reply.error["param"]) == (400, "temperature")


async def test_an_answer_that_takes_too_long(make_app: Callable[..., App], path: str) -> None:
    reply = await make_app(timeout_s=1e-6).client.posted(path, body_of(path))
    assert (reply.status, reply.error["code"]) == (504, "timeout")


async def test_a_stream_that_takes_too_long_ends_with_an_event(
    make_app: Callable[..., App], steps: Steps, path: str
) -> None:
    app = make_app(timeout_s=5.0)
    steps.hold()
    reply = await app.client.posted(path, body_of(path, stream=True))
    steps.release()
    parts = [part for part in reply.text.split("\n\n") if part]
    assert reply.status == 200
    assert json.loads(parts[-1].removeprefix("data: "))["error"]["code"] == "timeout"
    assert f'path="{path}",status="504"}} 1.0' in (await app.client.got("/metrics")).text


async def test_a_failure_in_the_midst_of_a_stream_is_its_last_event(
    make_app: Callable[..., App], steps: Steps, path: str
) -> None:
    app = make_app()

    def fail() -> None:
        if steps.n == 4:
            raise RuntimeError("of the model")

    steps.on_step = fail
    reply = await app.client.posted(path, body_of(path, stream=True))
    assert reply.status == 200
    parts = [part for part in reply.text.split("\n\n") if part]
    assert "server_error" in parts[-1]
    assert "[DONE]" not in reply.text
    assert "of the model" not in reply.text
    assert len(parts) > 2


# -- models and routes --------------------------------------------------------------------------
