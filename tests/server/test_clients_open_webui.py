"""What Open WebUI sends, replayed: its requests were read in its source, and it was not run here.

Its backend takes apart what its page sends, and asks with what is left
(``main.py``, ``routers/openai.py``, ``routers/tasks.py`` and ``utils/payload.py`` of its backend).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.live_server import ASKED, CHAT, KEY, LiveServer
from tests.support.load import from_caches
from tests.support.records import TEXTS

HEADERS = {
    "Content-Type": "application/json",
    "Authorization": f"Bearer {KEY}",
    # of ENABLE_FORWARD_USER_INFO_HEADERS
    "X-OpenWebUI-User-Name": "Ann%20Other",
    "X-OpenWebUI-User-Id": "8d8f2f5e",
    "X-OpenWebUI-User-Email": "ann@example.com",
    "X-OpenWebUI-User-Role": "user",
    "X-OpenWebUI-Chat-Id": "c0ffee",
}

USER = {"role": "user", "content": "Who are you?"}


@pytest.fixture
def web_ui(live: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, headers=HEADERS, trust_env=False, timeout=60) as client:
        yield client


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def text_of(events: list[dict[str, Any]]) -> str:
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stream_options": {"include_usage": True}},
        # what a user may set under "Advanced Params", as its mappings cast it
        {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 12, "seed": 0},
        {"frequency_penalty": 0.0, "presence_penalty": 0.0, "stop": ["\n\n"]},
        {"top_k": 40, "temperature": 0.0, "response_format": {"type": "text"}},
    ],
)
def test_a_chat_with_documents(
    web_ui: httpx.Client, live: LiveServer, more: dict[str, Any]
) -> None:
    body = {"stream": True, "model": "builtin", "messages": CHAT, **more}
    events = events_of(web_ui.post("/chat/completions", json=body).raise_for_status())
    assert text_of(events) == live.answer(CHAT)
    assert from_caches(events[-1]["samkv"]) == len(TEXTS)
    assert ("usage" in events[-1]) == ("stream_options" in more)


def test_documents_as_its_template_of_retrieval_writes_them(web_ui: httpx.Client) -> None:
    """Each in a tag with its number and name, which are not part of the chunk."""
    sources = "\n".join(
        f'<source id="{number}" name="town.txt">{text}</source>'
        for number, text in enumerate(TEXTS, start=1)
    )
    content = f"### Task:\nAnswer.\n\n<context>\n{sources}\n</context>\n\n{ASKED.question}"
    body = {"stream": True, "model": "builtin", "messages": [{"role": "user", "content": content}]}
    events = events_of(web_ui.post("/chat/completions", json=body).raise_for_status())
    assert from_caches(events[-1]["samkv"]) == len(TEXTS)


def test_its_own_tools_are_refused_by_name(web_ui: httpx.Client) -> None:
    """Native function calling, its default in newer versions; the guide says how to do without."""
    tools = [{"type": "function", "function": {"name": "get_current_timestamp", "parameters": {}}}]
    body = {"stream": True, "model": "builtin", "messages": [USER], "tools": tools}
    reply = web_ui.post("/chat/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools")
