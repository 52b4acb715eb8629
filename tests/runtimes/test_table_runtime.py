"""Everything but tensors works on a runtime of a hundred lines, which looks tokens up in a table.

Its answers depend on every entry of a prompt: a wrong or a missing cache changes them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from llama_index.core.llms import ChatMessage

from langchain_samkv import ChatSamKV, SamKV
from llama_index.llms.samkv import SamKVLLM
from samkv_integrations import ChunkStore, Engine, MemoryStore
from samkv_integrations.errors import InvalidOption
from samkv_integrations.server.app import create_app
from samkv_integrations.server.service import Settings
from samkv_integrations.server.tenancy import ApiKeys, Tenancy, Tenant
from samkv_integrations.serving.fairness import FairTurns
from samkv_integrations.serving.scheduler import Scheduler
from tests.support.asgi import Client
from tests.support.table_runtime import TableRuntime

TEXTS = [
    "The harbour of Ostmere was built in 1874.",
    "The town library holds 5120 books; it opens at nine.",
    "Two trains a day run to Ostmere; the line was laid by Ida Brandt.",
]
PROMPT = "\n\n".join((*TEXTS, "Question: Who laid the line?\nAnswer:"))
CHAT = [{"role": "user", "content": PROMPT}]


@pytest.fixture
def engine() -> Engine:
    return Engine(TableRuntime())


@pytest.fixture
def expected() -> str:
    """What full prefill answers, without any cache."""
    return Engine(TableRuntime(), method="recompute").generate(PROMPT).text


@pytest.mark.parametrize("method", ["recompute", "reuse", "epic", "samkv-guided", "auto"])
def test_methods_by_token_ids_answer_from_caches(
    method: str, engine: Engine, expected: str
) -> None:
    engine.cache_chunks(TEXTS)
    answer = engine.generate(PROMPT, method=method)
    assert answer.text == expected
    assert answer.report.found == len(TEXTS)
    assert (answer.report.reused == len(TEXTS)) == (answer.report.ran != "recompute")


def test_a_reused_prompt_computes_its_other_tokens_only(engine: Engine) -> None:
    engine.cache_chunks(TEXTS)
    report = engine.generate(PROMPT, method="reuse").report
    runtime = engine.model
    assert isinstance(runtime, TableRuntime)
    assert runtime.n_computed == report.prompt_tokens - sum(len(text.encode()) for text in TEXTS)
    assert report.cached_tokens == sum(len(text.encode()) for text in TEXTS)


def test_a_conversation_goes_on_from_memory(engine: Engine) -> None:
    engine.cache_chunks(TEXTS)
    first = engine.generate(CHAT)
    assert first.report.stays
    turns = [*CHAT, {"role": "assistant", "content": first.text},
             {"role": "user", "content": "And when was the harbour built?"}]  # fmt: skip
    second = engine.generate(turns)
    assert second.report.prefix_tokens > first.report.prompt_tokens
    assert second.text == Engine(TableRuntime(), method="recompute").generate(turns).text


def test_a_store_on_disk_gives_back_what_was_put(tmp_path: Path, expected: str) -> None:
    Engine(TableRuntime(), ChunkStore(tmp_path)).cache_chunks(TEXTS)
    again = Engine(TableRuntime(), ChunkStore(tmp_path))
    assert all(map(again.is_cached, TEXTS))
    answer = again.generate(PROMPT, method="reuse")
    assert (answer.text, answer.report.reused) == (expected, len(TEXTS))


@pytest.mark.parametrize("store", [MemoryStore, ChunkStore])
def test_what_is_forgotten_is_computed(
    store: Callable[..., Any], tmp_path: Path, expected: str
) -> None:
    engine = Engine(TableRuntime(), store(tmp_path) if store is ChunkStore else store())
    engine.cache_chunks(TEXTS)
    engine.generate(PROMPT)
    assert engine.forget(TEXTS[:1]) == 1
    answer = engine.generate(PROMPT, method="reuse", on_miss="text")
    assert (answer.text, answer.report.reused) == (expected, len(TEXTS) - 1)


@pytest.mark.parametrize("options", [{"method": "samkv-fusion"}, {"eviction": "h2o"}])
def test_what_needs_tensors_is_refused(engine: Engine, options: Any) -> None:
    engine.cache_chunks(TEXTS)
    with pytest.raises(InvalidOption, match="needs the transformers runtime"):
        engine.generate(PROMPT, **options)


def test_a_schema_is_refused_where_there_is_no_vocabulary_for_it(engine: Engine) -> None:
    with pytest.raises(InvalidOption, match="cannot follow a schema"):
        engine.generate(PROMPT, json_schema={"type": "object"})


class TestLangChain:
    async def test_completes_and_streams(self, engine: Engine, expected: str) -> None:
        engine.cache_chunks(TEXTS)
        llm = SamKV(engine=engine)
        assert llm.invoke(PROMPT) == await llm.ainvoke(PROMPT) == expected
        assert "".join(llm.stream(PROMPT)) == expected
        assert "".join([piece async for piece in llm.astream(PROMPT)]) == expected

    async def test_chats(self, engine: Engine) -> None:
        engine.cache_chunks(TEXTS)
        expected = Engine(TableRuntime(), method="recompute").generate(CHAT).text
        chat, turn = ChatSamKV(engine=engine), [HumanMessage(PROMPT)]
        assert chat.invoke(turn).content == (await chat.ainvoke(turn)).content == expected
        assert "".join(str(piece.content) for piece in chat.stream(turn)) == expected
        pieces = [str(piece.content) async for piece in chat.astream(turn)]
        assert "".join(pieces) == expected


class TestLlamaIndex:
    async def test_completes_and_streams(self, engine: Engine, expected: str) -> None:
        engine.cache_chunks(TEXTS)
        llm = SamKVLLM(engine=engine)
        assert llm.complete(PROMPT, formatted=True).text == expected
        assert (await llm.acomplete(PROMPT, formatted=True)).text == expected
        assert [*llm.stream_complete(PROMPT, formatted=True)][-1].text == expected
        pieces = [each async for each in await llm.astream_complete(PROMPT, formatted=True)]
        assert pieces[-1].text == expected

    async def test_chats(self, engine: Engine) -> None:
        engine.cache_chunks(TEXTS)
        expected = Engine(TableRuntime(), method="recompute").generate(CHAT).text
        llm, turn = SamKVLLM(engine=engine), [ChatMessage(role="user", content=PROMPT)]
        assert llm.chat(turn).message.content == expected
        assert (await llm.achat(turn)).message.content == expected
        assert [*llm.stream_chat(turn)][-1].message.content == expected
        pieces = [each async for each in await llm.astream_chat(turn)]
        assert pieces[-1].message.content == expected


async def test_the_server_chats(tmp_path: Path) -> None:
    tenancy = Tenancy(Scheduler(TableRuntime(), turns=FairTurns), tmp_path)
    app = create_app(tenancy, ApiKeys("", Tenant()), Settings(model_name="table", most_tokens=300))
    body = {"model": "table", "messages": CHAT}
    expected = Engine(TableRuntime(), method="recompute").generate(CHAT).text
    tenancy.engine(Tenant()).cache_chunks(TEXTS)
    answer = (await Client(app).posted("/v1/chat/completions", body)).body
    assert answer["choices"][0]["message"]["content"] == expected
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


ALONE = """
import sys
for name in ("torch", "transformers"):
    sys.modules[name] = None  # importing it fails, as if it were not installed

from tests.runtimes.test_table_runtime import CHAT, PROMPT, TEXTS
from samkv_integrations import ChunkStore, Engine
from tests.support.table_runtime import TableRuntime

engine = Engine(TableRuntime(), ChunkStore(sys.argv[1]))
engine.cache_chunks(TEXTS)
assert engine.generate(PROMPT, method="reuse").report.reused == len(TEXTS)
assert engine.generate(CHAT).text
assert engine.forget(TEXTS) == len(TEXTS)
"""


def test_torch_and_transformers_are_not_needed(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path)], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
