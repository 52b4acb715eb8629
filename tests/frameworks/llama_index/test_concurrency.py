"""Many callers on one engine, callers that go away, and calls that fail on the way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import zip_longest
from typing import Any

import pytest
from llama_index.core.llms import ChatMessage

from llama_index.llms.samkv import SamKVLLM
from llama_index.postprocessor.samkv import SamKVPostprocessor
from samkv_integrations.engine.scheduler import AHEAD
from samkv_integrations.errors import HandleError, PromptTooLong
from tests.support.handles import issued
from tests.support.llama_index_corpus import ASKED, TOP_K, Corpus, cached_prompt
from tests.support.records import RECORDS
from tests.support.steps import Steps

pytest_plugins = ("tests.support.llama_index_fixtures",)
pytestmark = pytest.mark.usefixtures("no_other_model")

ENDLESS = "Documents:\n\n[Dunlux"  # a prompt that the model goes on with for long
TOO_LONG = "salt " * 5000


def _too_long(prompt: str) -> str:
    """Longer than the window if it holds the question; an LLM measures its own functions too."""
    return TOO_LONG + prompt if ASKED.question in prompt else prompt


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


class TestManyAtOnce:
    def test_twenty_tasks(self, corpus: Corpus) -> None:
        llm = corpus.llm()

        async def whole(prompt: str) -> str:
            return (await llm.acomplete(prompt)).text

        async def chat(prompt: str) -> str:
            return (await llm.achat(user(prompt))).message.content

        async def stream(prompt: str) -> str:
            return "".join([piece.delta async for piece in await llm.astream_complete(prompt)])

        async def stream_chat(prompt: str) -> str:
            return "".join([piece.delta async for piece in await llm.astream_chat(user(prompt))])

        forms = (whole, chat, stream, stream_chat)
        asked = [RECORDS[place % len(RECORDS)] for place in range(20)]
        prompts = [cached_prompt(corpus, record=record) for record in asked]

        async def all_at_once() -> list[str]:
            calls = [forms[place % len(forms)](prompt) for place, prompt in enumerate(prompts)]
            return await asyncio.gather(*calls)

        one_by_one = [llm.complete(prompt).text for prompt in prompts]
        assert one_by_one == [f" {record.workers}" for record in asked]
        assert asyncio.run(all_at_once()) == one_by_one

    def test_interleaved_streams(self, corpus: Corpus) -> None:
        llm = corpus.llm()
        prompts = [cached_prompt(corpus, record=record) for record in RECORDS]
        streams: list[Iterator[Any]] = [llm.stream_complete(prompt) for prompt in prompts[:3]]
        streams += [llm.stream_chat(user(prompt)) for prompt in prompts[3:]]
        texts = [""] * len(streams)
        for pieces in zip_longest(*streams):
            for place, piece in enumerate(pieces):
                texts[place] += piece.delta if piece is not None else ""
        assert texts == [f" {record.workers}" for record in RECORDS]


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

    def test_abandoned_stream(self, corpus: Corpus, steps: Steps) -> None:
        llm = corpus.llm()
        steps.hold()
        for _ in llm.stream_complete(ENDLESS, formatted=True, max_tokens=100):
            steps.wait_until_held()  # else it may be dropped before any step
            break
        steps.release()
        answers_in_another_thread(corpus, llm)
        assert steps.counts.pop(next(iter(steps.counts))) <= 1  # which was under way
        llm.stream_complete(ENDLESS, formatted=True)  # not even looked at
        answers_in_another_thread(corpus, llm)
        assert all(n < AHEAD for n in steps.counts.values())

    def test_break_out_of_an_async_stream(self, corpus: Corpus, steps: Steps) -> None:
        llm = corpus.llm()

        async def leave_early() -> int:
            n_pieces = 0
            steps.hold()
            steps.allow(5)
            async for _ in await llm.astream_complete(ENDLESS, formatted=True, max_tokens=100):
                n_pieces += 1
                if n_pieces == 3:
                    break
            steps.release()
            await asyncio.to_thread(answers_in_another_thread, corpus, llm)
            assert steps.of_the_first <= 6
            return len(asyncio.all_tasks())

        assert asyncio.run(leave_early()) == 1

    @pytest.mark.parametrize("form", ["acomplete", "achat", "astream_complete", "astream_chat"])
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
            steps.allow(3)
            task = asyncio.create_task(call())
            await asyncio.to_thread(steps.wait_for, 3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            steps.release()
            await asyncio.to_thread(answers_in_another_thread, corpus, llm)
            assert steps.of_the_first <= 4  # one was under way
            assert asyncio.all_tasks() == {asyncio.current_task()}

        asyncio.run(cancel_on_the_way())

    def test_a_task_that_is_cancelled_waits_for_no_step(self, corpus: Corpus, steps: Steps) -> None:
        llm = corpus.llm()

        async def hurry() -> None:
            steps.hold()
            call = asyncio.create_task(llm.acomplete(ENDLESS, formatted=True, max_tokens=100))
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert steps.n == 0

        asyncio.run(hurry())
        steps.release()
        answers_in_another_thread(corpus, llm)


class TestFailures:
    """They reach the caller, whoever that is, and a stream's before its first piece."""

    @pytest.mark.parametrize(
        ("prompt", "error"),
        [(TOO_LONG, PromptTooLong), ("{cut}", HandleError)],
        ids=["too-long", "cut-handle"],
    )
    def test_at_the_call(self, corpus: Corpus, prompt: str, error: type[Exception]) -> None:
        prompt = prompt.format(cut=issued(corpus.engine, ASKED.text)[:20])
        llm, messages = corpus.llm(), user(prompt)
        calls: list[Callable[[], Any]] = [
            lambda: llm.complete(prompt),
            lambda: llm.stream_complete(prompt),
            lambda: llm.chat(messages),
            lambda: llm.stream_chat(messages),
            lambda: asyncio.run(llm.acomplete(prompt)),
            lambda: asyncio.run(llm.astream_complete(prompt)),
            lambda: asyncio.run(llm.achat(messages)),
            lambda: asyncio.run(llm.astream_chat(messages)),
        ]
        for call in calls:
            with pytest.raises(error):
                call()
        answers_in_another_thread(corpus, llm)

    @pytest.mark.parametrize(
        "form",
        # LlamaIndex does not see what these add when it packs a prompt
        [
            {"completion_to_prompt": _too_long},
            {"messages_to_prompt": lambda messages: _too_long(messages[-1].content)},
        ],
        ids=["completion", "chat"],
    )
    def test_through_a_query_engine(self, corpus: Corpus, form: dict[str, Any]) -> None:
        llm = corpus.llm(**form)
        whole = corpus.query_engine(llm, use_async=True)
        streaming = corpus.query_engine(llm, streaming=True, use_async=True)

        async def first_piece() -> None:
            response = await streaming.aquery(ASKED.question)
            await anext(response.async_response_gen())

        with pytest.raises(PromptTooLong):
            whole.query(ASKED.question)
        with pytest.raises(PromptTooLong):
            asyncio.run(whole.aquery(ASKED.question))
        # LlamaIndex calls a streaming LLM when the first piece is asked for
        with pytest.raises(PromptTooLong):
            next(streaming.query(ASKED.question).response_gen)
        with pytest.raises(PromptTooLong):
            asyncio.run(first_piece())

    def test_in_the_middle(self, corpus: Corpus, steps: Steps) -> None:
        llm = corpus.llm()

        def fail() -> None:
            if list(steps.counts.values())[-1] == 2:
                raise RuntimeError("the device is gone")

        steps.on_step = fail

        def consume(stream: Iterator[Any]) -> list[str]:
            pieces = []
            with pytest.raises(RuntimeError, match="the device is gone"):
                for piece in stream:
                    pieces.append(piece.delta)
            return pieces

        async def aconsume(stream: Any) -> list[str]:
            pieces = []
            with pytest.raises(RuntimeError, match="the device is gone"):
                async for piece in await stream:
                    pieces.append(piece.delta)
            return pieces

        messages = user(cached_prompt(corpus))
        found = [
            consume(llm.stream_complete(ENDLESS, formatted=True)),
            consume(llm.stream_chat(messages)),
            asyncio.run(aconsume(llm.astream_complete(ENDLESS, formatted=True))),
            asyncio.run(aconsume(llm.astream_chat(messages))),
        ]
        assert all(found)  # what was decided before is not lost
        for call in (llm.complete, lambda prompt, **o: asyncio.run(llm.acomplete(prompt, **o))):
            with pytest.raises(RuntimeError, match="the device is gone"):
                call(ENDLESS, formatted=True)
        assert llm.last_report is None
        steps.on_step = lambda: None
        answers_in_another_thread(corpus, llm)

    def test_in_the_middle_of_a_query_engine(self, corpus: Corpus, steps: Steps) -> None:
        llm = corpus.llm()

        def fail() -> None:
            raise RuntimeError("the device is gone")

        steps.on_step = fail
        postprocessor = SamKVPostprocessor(llm=llm)
        engine = corpus.query_engine(llm, postprocessor=postprocessor, streaming=True)
        response = engine.query(ASKED.question)
        assert len(response.source_nodes) == TOP_K
        with pytest.raises(RuntimeError, match="the device is gone"):
            list(response.response_gen)
