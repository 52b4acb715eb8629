"""Ways of having a conversation: an engine, frameworks over it, a server, plain transformers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any, Protocol, Unpack

import numpy as np
import torch
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from llama_index.core.chat_engine import SimpleChatEngine
from openai import OpenAI
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from benchmarks.question_sets import ANSWER_TOKENS
from langchain_samkv import ChatSamKV
from llama_index.llms.samkv import SamKVLLM
from samkv_integrations import Engine
from samkv_integrations.frameworks.tool_calls import takes_tools
from samkv_integrations.options import AnswerOptions
from samkv_integrations.prompt.layout import n_in_common
from samkv_integrations.prompt.reader import Prompt
from samkv_integrations.report import Report
from samkv_integrations.runtimes.base import Runtime
from samkv_integrations.server.app import create_app
from samkv_integrations.server.run import Server, address_of, listen_on
from samkv_integrations.server.service import Settings
from samkv_integrations.server.tenancy import ApiKeys, Tenancy, Tenant
from samkv_integrations.serving.scheduler import Scheduler
from samkv_integrations.serving.stream import AnswerStream
from samkv_integrations.store.base import Store

Document = tuple[str, str]
"""A line of title, and a text, which is the chunk."""

SYSTEM = "You answer from the documents in one short sentence."
INSTRUCTION = "Answer from these documents."
AGENT_TOKENS = 64
"""Most tokens of an agent's answer, which may be a call of its tool."""
TOOL = {"type": "function", "function": {
    "name": "search", "description": "Searches the documents.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}},
                   "required": ["query"]},
}}  # fmt: skip


def joined(documents: Sequence[Document]) -> str:
    """Documents as a template joins them."""
    return "\n\n".join(f"{title}\n{text}" for title, text in documents)


def asked_over(documents: Sequence[Document], question: str) -> str:
    """A user's message; without documents the question alone."""
    if not documents:
        return question
    return f"{INSTRUCTION}\n\n{joined(documents)}\n\nQuestion: {question}"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """An answer and what it cost. first_s, whole_s: CPU seconds to its first token, and its end."""

    text: str
    ran: str
    prompt_tokens: int
    computed_tokens: int
    completion_tokens: int
    first_s: float
    whole_s: float

    @classmethod
    def of(cls, text: str, report: Report, began: float, first: float) -> Turn:
        """An answer that ends now; began, first: by `time.process_time`."""
        return cls(
            text=text, ran=report.ran, prompt_tokens=report.prompt_tokens,
            computed_tokens=report.prompt_tokens - report.cached_tokens,
            completion_tokens=report.completion_tokens, first_s=round(first - began, 4),
            whole_s=round(time.process_time() - began, 4),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a conversation takes place.

    store: holds the caches of its chunks. opened: ends with the conversation.
    """

    model: Runtime
    scheduler: Scheduler
    store: Store
    texts: Sequence[str]
    opened: ExitStack


class Chat(Protocol):
    """A conversation as one way of one front end has it."""

    def ask(self, documents: Sequence[Document], question: str) -> Turn:
        """The next turn. documents: those that come with it."""


class NotingEngine(Engine):
    """Notes its last answer, and when the first token was there, whatever shows the answer."""

    last: AnswerStream
    first: float

    def stream(
        self, prompt: Prompt, chunks: Sequence[str] | None = None, **options: Unpack[AnswerOptions]
    ) -> AnswerStream:
        """As `Engine` does."""
        self.last = super().stream(prompt, chunks, **options)
        self.first = time.process_time()
        return self.last

    def turn(self, text: str, began: float) -> Turn:
        """The turn whose answer has ended."""
        return Turn.of(text, self.last.report, began, self.first)

    @classmethod
    def at(cls, place: Place, **options: Any) -> NotingEngine:
        """An engine with an empty memory."""
        return cls(place.model, place.store, scheduler=place.scheduler, **options)


class EngineChat:
    """No framework. options: of the engine."""

    def __init__(self, place: Place, **options: Any) -> None:
        self._engine = NotingEngine.at(place, **options)
        self._turns = [{"role": "system", "content": SYSTEM}]

    def ask(self, documents: Sequence[Document], question: str) -> Turn:
        began = time.process_time()
        self._turns.append({"role": "user", "content": asked_over(documents, question)})
        text = self._engine.generate(self._turns, max_new_tokens=ANSWER_TOKENS).text
        self._turns.append({"role": "assistant", "content": text})
        return self._engine.turn(text, began)


class LangChainChat:
    """`ChatSamKV`, whose messages are appended to a list."""

    max_tokens = ANSWER_TOKENS

    def __init__(self, place: Place, *, match_text: bool = True) -> None:
        self._engine = NotingEngine.at(place)
        self._llm: Any = ChatSamKV(
            engine=self._engine, match_text=match_text, max_tokens=self.max_tokens
        )
        self._messages: list[BaseMessage] = [SystemMessage(SYSTEM)]

    def ask(self, documents: Sequence[Document], question: str) -> Turn:
        began = time.process_time()
        self._messages += self._asked(documents, question)
        answer: AIMessage = self._llm.invoke(self._messages)
        self._messages.append(answer)
        for call in answer.tool_calls:  # every call needs a result
            self._messages.append(ToolMessage("No more results.", tool_call_id=call["id"]))
        return self._engine.turn(answer.text, began)

    def _asked(self, documents: Sequence[Document], question: str) -> list[BaseMessage]:
        return [HumanMessage(asked_over(documents, question))]


class AgentChat(LangChainChat):
    """The loop of an agent: documents are results of a tool, which the script calls.

    For a model whose chat template takes no tools they stand in the user's message.
    """

    max_tokens = AGENT_TOKENS

    def __init__(self, place: Place, *, match_text: bool = True) -> None:
        super().__init__(place, match_text=match_text)
        self._has_tools = takes_tools(place.model)
        if self._has_tools:
            self._llm = self._llm.bind_tools([TOOL])

    def _asked(self, documents: Sequence[Document], question: str) -> list[BaseMessage]:
        if not documents:
            return [HumanMessage(question)]
        if not self._has_tools:
            return [HumanMessage(f"Search results:\n\n{joined(documents)}\n\n{question}")]
        number = f"call{len(self._messages):05d}"
        call = {"name": "search", "args": {"query": question}, "id": number}
        return [
            HumanMessage(question), AIMessage("", tool_calls=[call]),
            ToolMessage(joined(documents), tool_call_id=number),
        ]  # fmt: skip


class LlamaIndexChat:
    """`SamKVLLM` in a `SimpleChatEngine`, with its memory."""

    def __init__(self, place: Place, *, match_text: bool = True) -> None:
        self._engine = NotingEngine.at(place)
        llm = SamKVLLM(engine=self._engine, match_text=match_text, max_new_tokens=ANSWER_TOKENS)
        self._chat = SimpleChatEngine.from_defaults(llm=llm, system_prompt=SYSTEM)

    def ask(self, documents: Sequence[Document], question: str) -> Turn:
        began = time.process_time()
        answer = self._chat.chat(asked_over(documents, question))
        return self._engine.turn(answer.response, began)


class OpenAIChat:
    """The client of OpenAI, and the server in this process.

    CPU seconds are those of both, to the first piece of text, which may come a token later.
    """

    def __init__(self, place: Place) -> None:
        folder = place.opened.enter_context(TemporaryDirectory())
        tenancy = Tenancy(place.scheduler, Path(folder))
        tenancy.engine(Tenant()).cache_chunks(place.texts)
        keys, is_ready = ApiKeys("", Tenant()), Event()
        server = Server(create_app(tenancy, keys, Settings(model_name="it")), 30, is_ready.set)
        listening = place.opened.enter_context(listen_on("127.0.0.1", 0, keys))
        thread = Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        place.opened.callback(thread.join)
        place.opened.callback(setattr, server, "should_exit", True)
        is_ready.wait()
        client = OpenAI(base_url=f"{address_of(listening)}/v1", api_key="none", max_retries=0)
        self._client = place.opened.enter_context(client)
        self._messages: list[Any] = [{"role": "system", "content": SYSTEM}]

    def ask(self, documents: Sequence[Document], question: str) -> Turn:
        began, first, text = time.process_time(), 0.0, ""
        report: dict[str, Any] = {}
        self._messages.append({"role": "user", "content": asked_over(documents, question)})
        for part in self._client.chat.completions.create(
            model="it", messages=self._messages, max_tokens=ANSWER_TOKENS, stream=True
        ):
            delta = part.choices[0].delta.content if part.choices else None
            if delta and not text:
                first = time.process_time()
            text += delta or ""
            report = (part.model_extra or {}).get("samkv", report)
        self._messages.append({"role": "assistant", "content": text})
        return Turn.of(text, Report(**report), began, first or time.process_time())


class _FirstToken(BaseStreamer):
    """Notes when transformers has the first token. first: by `time.process_time`; 0 before."""

    def __init__(self) -> None:
        self._n_put, self.first = 0, 0.0

    def put(self, value: object) -> None:
        self._n_put += 1
        if self._n_put == 2:  # the prompt is put first
            self.first = time.process_time()

    def end(self) -> None: ...


class TransformersChat:
    """transformers' own ``generate``, over a cache that it keeps and cuts to what is common."""

    def __init__(self, place: Place) -> None:
        self._model, self._cache, self._held = place.model, DynamicCache(), np.zeros(0, np.int64)
        self._turns = [{"role": "system", "content": SYSTEM}]

    def ask(self, documents: Sequence[Document], question: str) -> Turn:
        began, model, streamer = time.process_time(), self._model, _FirstToken()
        self._turns.append({"role": "user", "content": asked_over(documents, question)})
        given = model.tokenizer.apply_chat_template(
            self._turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = given["input_ids"][0].numpy()
        n_held = min(n_in_common(self._held, ids), len(ids) - 1)
        if n_held < self._cache.get_seq_length():
            self._cache.crop(n_held - self._cache.get_seq_length())  # so many fewer
        with torch.inference_mode():
            made: Any = model.hf.generate(
                **given, past_key_values=self._cache, max_new_tokens=ANSWER_TOKENS,
                do_sample=False, streamer=streamer,
            )[0]  # fmt: skip
        self._held = made[: self._cache.get_seq_length()].numpy()
        text = model.tokenizer.decode(made[len(ids) :], skip_special_tokens=True)
        self._turns.append({"role": "assistant", "content": text})
        is_ended = int(made[-1]) in model.end_ids(())
        return Turn(
            text=text, ran="transformers", prompt_tokens=len(ids),
            computed_tokens=len(ids) - n_held, completion_tokens=len(made) - len(ids) - is_ended,
            first_s=round(streamer.first - began, 4),
            whole_s=round(time.process_time() - began, 4),
        )  # fmt: skip
