"""What waits for the model, for a task, holds no thread of asyncio's default executor.

Such a thread would be one that unrelated work of the process waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from llama_index.core.llms import ChatMessage
from llama_index.core.schema import NodeWithScore, TextNode

from langchain_samkv import (
    ChatSamKV,
    SamKV,
    SamKVChroma,
    SamKVDocumentCompressor,
    SamKVDocumentTransformer,
)
from llama_index.llms.samkv import SamKVLLM
from llama_index.postprocessor.samkv import SamKVPostprocessor
from samkv_integrations import Engine, MemoryStore
from tests.support.langchain_store import Letters
from tests.support.models import tiny_model
from tests.support.served import TEXTS


class Nobody(ThreadPoolExecutor):
    def submit(self, *given: object, **options: object) -> object:  # type: ignore[override]
        raise AssertionError("a thread of asyncio's default executor was asked for")


@pytest.fixture
def engine() -> Engine:
    return Engine(tiny_model("llama"), MemoryStore(), method="reuse", block_size=8)


def ran(work: Coroutine[Any, Any, Any]) -> Any:
    async def alone() -> Any:
        asyncio.get_running_loop().set_default_executor(Nobody())
        return await work

    return asyncio.run(alone())


def test_langchain_ingests(engine: Engine, tmp_path: Path) -> None:
    store = SamKVChroma(
        "notes", Letters(), persist_directory=str(tmp_path / "chroma"), engine=engine
    )
    documents = [Document(text, metadata={"n": at}) for at, text in enumerate(TEXTS)]
    ids = ran(store.aadd_documents(documents))
    assert [one.page_content for one in store.get_by_ids(ids)] == TEXTS
    assert all(engine.is_cached(text) for text in TEXTS)


def test_langchain_transforms_and_compresses(engine: Engine) -> None:
    first, *others = [Document(text) for text in TEXTS]
    assert ran(SamKVDocumentTransformer(engine=engine).atransform_documents([first])) == [first]
    assert engine.is_cached(TEXTS[0])
    compressor = SamKVDocumentCompressor(engine=engine, on_miss="compute")
    assert ran(compressor.acompress_documents(others, "Q?")) == others
    assert all(engine.is_cached(text) for text in TEXTS)


def test_langchain_answers(engine: Engine) -> None:
    prompt = f"{TEXTS[0]}\n\nQ?"
    llm, chat = SamKV(engine=engine, max_tokens=4), ChatSamKV(engine=engine, max_tokens=4)
    assert ran(llm.ainvoke(prompt)) == llm.invoke(prompt)
    assert ran(chat.ainvoke([HumanMessage(prompt)])).text == chat.invoke(prompt).text


def test_llama_index_postprocesses_and_answers(engine: Engine) -> None:
    nodes = [NodeWithScore(node=TextNode(text=text), score=1.0) for text in TEXTS]
    postprocessor = SamKVPostprocessor(engine=engine, on_miss="compute")
    found = ran(postprocessor.apostprocess_nodes(nodes))
    assert [each.node.node_id for each in found] == [each.node.node_id for each in nodes]
    assert all(engine.is_cached(text) for text in TEXTS)
    llm = SamKVLLM(engine=engine, max_new_tokens=4)
    assert ran(llm.acomplete("Q?")).text == llm.complete("Q?").text
    messages = [ChatMessage(role="user", content="Q?")]
    assert ran(llm.achat(messages)).message.content == llm.chat(messages).message.content
