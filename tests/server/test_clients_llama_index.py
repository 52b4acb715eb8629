"""LlamaIndex's OpenAILike against a real server."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from llama_index.core import PromptTemplate, VectorStoreIndex
from llama_index.core.llms import ChatMessage
from llama_index.core.schema import TextNode
from llama_index.llms.openai_like import OpenAILike

from tests.support.live_server import (
    ASKED,
    CHAT,
    COMPLETION,
    KEY,
    MAX_TOKENS,
    QUESTION,
    LiveServer,
)
from tests.support.llama_index_corpus import Lexical
from tests.support.load import from_caches
from tests.support.records import CHAT_TEMPLATE, TEXTS

MESSAGES = [ChatMessage(role="user", content=QUESTION)]


def llm_of(live: LiveServer, **options: Any) -> OpenAILike:
    return OpenAILike(
        model="builtin", api_base=live.url, max_tokens=MAX_TOKENS, temperature=0, max_retries=0,
        **{"api_key": KEY, "is_chat_model": True, **options},
    )  # fmt: skip


@pytest.fixture
def llm(live: LiveServer) -> OpenAILike:
    return llm_of(live)


@pytest.fixture(scope="module")
def expected(live: LiveServer) -> str:
    return live.answer(CHAT)


def check_reused(raw: Any) -> None:
    """What the client's classes keep of a body, or of the last event."""
    assert from_caches(raw.model_extra["samkv"]) == len(TEXTS)


def test_chat(llm: OpenAILike, expected: str) -> None:
    answer = llm.chat(MESSAGES)
    assert answer.message.content == expected
    check_reused(answer.raw)
    assert answer.raw.usage.prompt_tokens_details.cached_tokens > 0


async def test_achat_and_astream_chat(llm: OpenAILike, expected: str) -> None:
    answer = await llm.achat(MESSAGES)
    assert answer.message.content == expected
    check_reused(answer.raw)
    stream = await llm.astream_chat(MESSAGES)
    assert [answer async for answer in stream][-1].message.content == expected


def test_complete(live: LiveServer) -> None:
    llm = llm_of(live, is_chat_model=False)
    answer = llm.complete(COMPLETION)
    assert answer.text == live.answer(COMPLETION)
    check_reused(answer.raw)
    *_, last = llm.stream_complete(COMPLETION)
    assert last.text == answer.text


def test_a_query_engine_over_an_index(llm: OpenAILike, live: LiveServer) -> None:
    """The client's own index, whose texts the server has cached."""
    index = VectorStoreIndex([TextNode(text=text) for text in TEXTS], embed_model=Lexical())
    engine = index.as_query_engine(
        llm=llm,
        similarity_top_k=len(TEXTS),
        text_qa_template=PromptTemplate(CHAT_TEMPLATE),
    )
    answer = engine.query(ASKED.question)
    context = "\n\n".join(node.text for node in answer.source_nodes)
    prompt = CHAT_TEMPLATE.format(context_str=context, query_str=ASKED.question)
    assert str(answer) == live.answer([{"role": "user", "content": prompt}])
    assert ASKED.workers in str(answer)
    streaming = index.as_query_engine(
        llm=llm,
        similarity_top_k=len(TEXTS),
        text_qa_template=PromptTemplate(CHAT_TEMPLATE),
        streaming=True,
    )
    assert str(streaming.query(ASKED.question)) == str(answer)


def test_errors_are_those_of_the_client(live: LiveServer, llm: OpenAILike) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        llm.complete(QUESTION * 20)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        llm_of(live, api_key="sk-of-somebody-else-1").chat(MESSAGES)
