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


@pytest.fixture
def app(make_app: Callable[..., App]) -> App:
    app = make_app()
    app.engine().cache_chunks(TEXTS)
    return app


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


async def test_an_answer_that_takes_too_long(make_app: Callable[..., App], path: str) -> None:
    reply = await make_app(timeout_s=1e-6).client.posted(path, body_of(path))
    assert (reply.status, reply.error["code"]) == (504, "timeout")


async def test_a_stream_that_takes_too_long_ends_with_an_event(
    make_app: Callable[..., App], steps: Steps, path: str
) -> None:
    app = make_app(timeout_s=2.0)
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
