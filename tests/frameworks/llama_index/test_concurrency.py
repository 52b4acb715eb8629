"""Many callers on one engine, callers that go away, and calls that fail on the way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from llama_index.core.llms import ChatMessage

from llama_index.llms.samkv import SamKVLLM
from tests.support.llama_index_corpus import ASKED, Corpus, cached_prompt
from tests.support.steps import Steps

pytest_plugins = ("tests.support.llama_index_fixtures",)
pytestmark = pytest.mark.usefixtures("no_other_model")

ENDLESS = "Documents:\n\n[Dunlux"  # a prompt that the model goes on with for long
PATIENCE_S = 60


def user(content: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=content)]


def answers_in_another_thread(corpus: Corpus, llm: SamKVLLM) -> None:
    """A lock that somebody kept would let nobody but its own thread in."""
    found: list[str] = []
    thread = threading.Thread(
        target=lambda: found.append(llm.complete(cached_prompt(corpus)).text), daemon=True
    )
    thread.start()
    thread.join(PATIENCE_S)
    assert found == [f" {ASKED.workers}"]


class TestCallersThatGoAway:
    @pytest.mark.parametrize("is_chat", [False, True])
    def test_closed_stream(self, corpus: Corpus, steps: Steps, is_chat: bool) -> None:
        llm = corpus.llm()
        start = (
            (lambda: llm.stream_chat(user(ENDLESS), max_tokens=100))
            if is_chat
            else (lambda: llm.stream_complete(ENDLESS, formatted=True, max_tokens=100))
        )
        before = llm.last_report
        steps.hold()
        steps.allow(5)
        stream = start()
        next(stream)
        next(stream)
        stream.close()
        assert list(stream) == []
        assert llm.last_report is before  # it never became an answer
        steps.release()
        answers_in_another_thread(corpus, llm)
        assert steps.of_the_first <= 6  # one of them was under way

    @pytest.mark.parametrize("form", ["acomplete", "astream_chat"])
    def test_cancelled_task(self, corpus: Corpus, steps: Steps, form: str) -> None:
        llm = corpus.llm()
        argument: Any = user(ENDLESS) if "chat" in form else ENDLESS
        options = {"max_tokens": 100} | ({} if "chat" in form else {"formatted": True})

        async def call() -> None:
            response = await getattr(llm, form)(argument, **options)
            if isinstance(response, AsyncIterator):
                async for _ in response:
                    pass

        async def cancel_on_the_way() -> None:
            steps.hold()
            steps.allow(1)  # as a chat an answer has three tokens
            task = asyncio.create_task(call())
            await asyncio.to_thread(steps.wait_for, 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            steps.release()
            await asyncio.to_thread(answers_in_another_thread, corpus, llm)
            assert steps.of_the_first <= 2  # one was under way
            assert asyncio.all_tasks() == {asyncio.current_task()}

        asyncio.run(cancel_on_the_way())
