"""What OpenTelemetry is told of a server's answers: spans below those of who asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.server.conftest import App
from tests.support.served import PROMPT, TEXTS
from tests.support.steps import Steps
from tests.support.telemetry import Told

PATHS = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
}
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADER = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture
def app(make_app: Callable[..., App]) -> App:
    app = make_app()
    app.engine().cache_chunks(TEXTS)
    return app


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_an_answer_is_below_the_client(
    app: App, told: Told, path: str, is_streamed: bool
) -> None:
    body = {"model": "tiny", "max_tokens": 2, "stream": is_streamed, **PATHS[path]}
    assert (await app.client.posted(path, body, traceparent=HEADER)).status == 200
    (span,) = told.answers
    sender = told.sender_of(span)
    assert (sender.trace_id, sender.span_id) == (int(TRACE, 16), int(SPAN, 16))
    assert span.attributes and span.attributes["samkv.chunk.hits"] == 3
    assert span.name.split()[0] == ("chat" if "chat" in path else "text_completion")


async def test_requests_are_below_their_own_clients(app: App, told: Told) -> None:
    """And nothing is left of one for the next."""
    body = {"model": "tiny", "max_tokens": 1, "prompt": PROMPT}
    replies = [
        app.client.post("/v1/completions", body, traceparent=f"00-{number:032x}-{SPAN}-01")
        for number in (1, 2, 3)
    ]
    await asyncio.gather(*(reply.end() for reply in replies))
    assert sorted(told.sender_of(span).trace_id for span in told.answers) == [1, 2, 3]
    await app.client.posted("/v1/completions", body)
    assert [told.sender_of(span) for span in told.answers].count(None) == 1


async def test_a_failed_request_is_told_without_its_text(
    app: App, told: Told, steps: Steps
) -> None:
    """Regression: FastAPI logs the message of every error to OpenTelemetry, unless told not to."""

    def fail() -> None:
        raise RuntimeError("zugzwang")

    steps.on_step = fail
    asked = {"model": "tiny", "prompt": f"zugzwang {PROMPT}"}
    for options, status in (
        ({"max_tokens": 4000}, 400), ({"temperature": "zugzwang"}, 400), ({"max_tokens": 2}, 500),
    ):  # fmt: skip
        assert (await app.client.posted("/v1/completions", asked | options)).status == status
    kinds = [(span.attributes or {})["error.type"] for span in told.answers]
    assert kinds == ["PromptTooLong", "RuntimeError"]
    assert told.logs == []
    assert not [each.name for each in told.spans if "zugzwang" in each.to_json()]
