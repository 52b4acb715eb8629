"""Who watches a pipeline sees each call of the LLM once, with our figures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.callbacks import CallbackManager, CBEventType, TokenCountingHandler
from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import (
    LLMChatEndEvent,
    LLMChatInProgressEvent,
    LLMChatStartEvent,
    LLMCompletionEndEvent,
    LLMCompletionInProgressEvent,
    LLMCompletionStartEvent,
)
from llama_index.core.llms import ChatMessage

from llama_index.llms.samkv import SamKVLLM
from samkv_integrations.errors import PromptTooLong
from tests.support.llama_index_corpus import Corpus, cached_prompt
from tests.support.steps import Steps

pytest_plugins = ("tests.support.llama_index_fixtures",)
pytestmark = pytest.mark.usefixtures("no_other_model")


class LlmEvents(BaseCallbackHandler):
    """Payloads of the events of LLM calls that a callback manager is told."""

    def __init__(self) -> None:
        super().__init__([], [])
        self.started: list[dict[str, Any]] = []
        self.ended: list[dict[str, Any]] = []

    def on_event_start(self, event_type: Any, payload: Any = None, **rest: Any) -> str:
        if event_type == CBEventType.LLM:
            self.started.append(payload)
        return rest.get("event_id", "")

    def on_event_end(self, event_type: Any, payload: Any = None, **rest: Any) -> None:
        if event_type == CBEventType.LLM:
            self.ended.append(payload)

    def start_trace(self, trace_id: str | None = None) -> None: ...

    def end_trace(self, trace_id: Any = None, trace_map: Any = None) -> None: ...


class Dispatched(BaseEventHandler):
    """Events of LLM calls that the dispatcher of the instrumentation is told."""

    events: list[Any] = []

    def handle(self, event: Any, **rest: Any) -> None:
        if event.class_name().startswith(("LLMChat", "LLMCompletion")):
            self.events.append(event)

    def drain(self) -> list[Any]:
        events = list(self.events)
        self.events.clear()
        return events


@pytest.fixture
def dispatched() -> Iterator[Dispatched]:
    handler, root = Dispatched(), get_dispatcher()
    root.add_event_handler(handler)
    yield handler
    root.event_handlers.remove(handler)


async def exhaust(stream: Any) -> list[Any]:
    return [response async for response in await stream]


def every_call(llm: SamKVLLM, prompt: str) -> dict[str, Callable[[], list[Any]]]:
    """What can be called -> a call that returns the responses which it gave."""
    messages, template = [ChatMessage(role="user", content=prompt)], PromptTemplate(prompt)
    return {
        "complete": lambda: [llm.complete(prompt)],
        "stream_complete": lambda: list(llm.stream_complete(prompt)),
        "chat": lambda: [llm.chat(messages)],
        "stream_chat": lambda: list(llm.stream_chat(messages)),
        "acomplete": lambda: [asyncio.run(llm.acomplete(prompt))],
        "astream_complete": lambda: asyncio.run(exhaust(llm.astream_complete(prompt))),
        "achat": lambda: [asyncio.run(llm.achat(messages))],
        "astream_chat": lambda: asyncio.run(exhaust(llm.astream_chat(messages))),
        # LlamaIndex's own ways to them
        "predict (chat)": lambda: [llm.predict(template)],
        "stream (chat)": lambda: list(llm.stream(template)),
        "apredict (chat)": lambda: [asyncio.run(llm.apredict(template))],
        "astream (chat)": lambda: asyncio.run(exhaust(llm.astream(template))),
    }


CALLS = list(every_call(None, ""))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CALLS)
def test_one_pair_a_call_with_our_figures(
    corpus: Corpus, dispatched: Dispatched, name: str
) -> None:
    events, counter = LlmEvents(), TokenCountingHandler()
    llm = corpus.llm(callback_manager=CallbackManager([events, counter]))
    responses = every_call(llm, cached_prompt(corpus))[name]()
    usage = (llm.last_report.prompt_tokens, llm.last_report.completion_tokens)

    assert (len(events.started), len(events.ended)) == (1, 1)
    (counted,) = counter.llm_token_counts
    assert (counted.prompt_token_count, counted.completion_token_count) == usage

    kinds = {
        True: (LLMChatStartEvent, LLMChatInProgressEvent, LLMChatEndEvent),
        False: (LLMCompletionStartEvent, LLMCompletionInProgressEvent, LLMCompletionEndEvent),
    }
    start, progress, end = kinds["chat" in name]
    first, *middle, last = dispatched.drain()
    assert (type(first), type(last)) == (start, end)
    assert {type(event) for event in middle} <= {progress}
    assert len(middle) == (len(responses) if "stream" in name else 0)
    assert first.model_dict["class_name"] == "SamKV_LLM"
    told = last.response.raw["usage"]
    assert told["total_tokens"] == sum(usage)
    cached = llm.last_report.cached_tokens
    assert told["prompt_tokens_details"] == {"cached_tokens": cached} != {"cached_tokens": 0}
    assert last.response.raw["samkv"] == llm.last_report.to_dict()


def test_what_was_asked_is_in_the_events(corpus: Corpus, dispatched: Dispatched) -> None:
    events = LlmEvents()
    llm = corpus.llm(callback_manager=CallbackManager([events]))
    llm.complete("Hello", temperature=0.0)
    assert events.ended[0]["formatted_prompt"] == "Hello"
    assert events.started[0]["additional_kwargs"] == {"temperature": 0.0}
    start, end = dispatched.drain()
    assert start.prompt == end.prompt == "Hello"


def test_a_failed_call_ends_too(corpus: Corpus, dispatched: Dispatched, steps: Steps) -> None:
    events = LlmEvents()
    llm = corpus.llm(callback_manager=CallbackManager([events]))
    calls = every_call(llm, "salt " * 5000)
    for n_calls, name in enumerate(CALLS[:8], start=1):
        with pytest.raises(PromptTooLong):
            calls[name]()
        assert (len(events.started), len(events.ended)) == (n_calls, n_calls)
        assert isinstance(events.ended[-1]["exception"], PromptTooLong)
    assert [type(event) for event in dispatched.drain()].count(LLMChatEndEvent) == 0

    def fail() -> None:
        raise RuntimeError("the device is gone")

    steps.on_step = fail
    calls = every_call(llm, cached_prompt(corpus))
    for n_calls, name in enumerate(CALLS[:8], start=9):  # streams fail after their first piece
        with pytest.raises(RuntimeError, match="the device is gone"):
            calls[name]()
        assert (len(events.started), len(events.ended)) == (n_calls, n_calls)


def test_a_stream_that_is_closed_ends_too(corpus: Corpus) -> None:
    events = LlmEvents()
    llm = corpus.llm(callback_manager=CallbackManager([events]))
    stream = llm.stream_complete("Documents:\n\n[Dunlux", formatted=True)
    next(stream)
    assert (len(events.started), len(events.ended)) == (1, 0)
    stream.close()
    assert len(events.ended) == 1


def test_a_query_is_one_call(corpus: Corpus, dispatched: Dispatched) -> None:
    llm = corpus.llm()
    corpus.query_engine(llm).query("How many people work at Dunlux Foundry?")
    assert [type(event) for event in dispatched.drain()] == [LLMChatStartEvent, LLMChatEndEvent]
