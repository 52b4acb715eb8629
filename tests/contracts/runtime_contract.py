"""What every `Runtime` must do. A test module makes a subclass for each runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from langchain_core.messages import HumanMessage
from llama_index.core.llms import ChatMessage

from langchain_samkv import ChatSamKV, SamKV
from llama_index.llms.samkv import SamKVLLM
from samkv_integrations import ChunkStore, Engine, MemoryStore
from samkv_integrations.methods import names_by_tokens
from samkv_integrations.runtimes.base import Runtime
from samkv_integrations.server.app import create_app
from samkv_integrations.server.service import Settings
from samkv_integrations.server.tenancy import ApiKeys, Tenancy, Tenant
from samkv_integrations.serving.fairness import FairTurns
from samkv_integrations.serving.scheduler import Scheduler
from tests.support.asgi import Client

TEXTS = [
    "The harbour of Ostmere was built in 1874, and enlarged twice, by engineers of the navy.",
    "The town library holds 5120 books; it opens at nine, and closes late on market days.",
    "Two trains a day run to Ostmere; the line was laid by Ida Brandt, who had come from Varen.",
]
PROMPT = "\n\n".join((*TEXTS, "Question: Who laid the line?\nAnswer:"))
CHAT = [{"role": "user", "content": PROMPT}]
MOST = 16
"""Tokens of an answer."""


class RuntimeContract:
    """Subclass it as ``Test...`` with a `runtime`.

    is_exact: whether an entry depends on its own token alone, as a table's does and a model's does
        not. Answers over caches are then those of full prefill; else they are those of a new engine
        with the same caches.
    repeats_bits: whether the entries of a token do not depend, in the last bits, on which tokens
        are computed together with it.
    """

    is_exact: ClassVar[bool] = False
    repeats_bits: ClassVar[bool] = True

    def runtime(self) -> Runtime:
        """A runtime of the same model each time. Its answers are greedy and not empty."""
        raise NotImplementedError

    @pytest.fixture
    def engine(self) -> Engine:
        """Answers from caches of all texts."""
        engine = Engine(self.runtime(), method="reuse")
        engine.cache_chunks(TEXTS)
        return engine

    def expected(
        self, prompt: Any, method: str = "reuse", texts: Sequence[str] = TEXTS
    ) -> str:  # fmt: skip
        """The answer of a new engine that has caches of ``texts``."""
        engine = Engine(self.runtime(), method="recompute" if self.is_exact else method)
        engine.cache_chunks(texts)
        text = engine.generate(prompt, on_miss="text", max_new_tokens=MOST).text
        assert text
        return text

    @pytest.mark.parametrize("method", names_by_tokens())
    def test_methods_by_token_ids_answer_from_caches(self, engine: Engine, method: str) -> None:
        answer = engine.generate(PROMPT, method=method, max_new_tokens=MOST)
        assert answer.text == self.expected(PROMPT, method)
        assert answer.report.found == len(TEXTS)
        assert (answer.report.reused == len(TEXTS)) == (answer.report.ran != "recompute")

    def test_a_reused_prompt_computes_its_other_tokens_only(self, engine: Engine) -> None:
        report = engine.generate(PROMPT, max_new_tokens=MOST).report
        ids = [engine.model.tokenize(text, special=False) for text in TEXTS]
        assert report.recompute_ratio == 0
        assert report.cached_tokens >= sum(map(len, ids)) - 4 * len(TEXTS)  # edges may merge

    def test_logits_follow_given_tokens(self, engine: Engine) -> None:
        follow = engine.model.tokenize(" the", special=False)[:1] * 2
        found = np.asarray(engine.logits(PROMPT, follow=follow))
        first = np.asarray(engine.logits(PROMPT))
        assert found.shape == (3, first.shape[1])
        assert found[0].argmax() == first[0].argmax()

    def test_a_conversation_goes_on_from_memory(self) -> None:
        engine = Engine(self.runtime(), method="recompute")
        first = engine.generate(CHAT, max_new_tokens=MOST)
        assert first.report.stays
        turns = [*CHAT, {"role": "assistant", "content": first.text},
                 {"role": "user", "content": "And when was the harbour built?"}]  # fmt: skip
        second = engine.generate(turns, max_new_tokens=MOST)
        assert second.report.prefix_tokens >= first.report.prompt_tokens
        assert second.text
        if self.repeats_bits:
            assert second.text == self.expected(turns, "recompute")

    def test_a_store_on_disk_gives_back_what_was_put(self, tmp_path: Path) -> None:
        Engine(self.runtime(), ChunkStore(tmp_path)).cache_chunks(TEXTS)
        again = Engine(self.runtime(), ChunkStore(tmp_path))
        assert all(map(again.is_cached, TEXTS))
        answer = again.generate(PROMPT, method="reuse", max_new_tokens=MOST)
        assert (answer.text, answer.report.reused) == (self.expected(PROMPT), len(TEXTS))

    @pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
    def test_what_is_forgotten_is_computed(self, on_disk: bool, tmp_path: Path) -> None:
        store = ChunkStore(tmp_path) if on_disk else MemoryStore()
        engine = Engine(self.runtime(), store, method="reuse")
        engine.cache_chunks(TEXTS)
        engine.generate(PROMPT, max_new_tokens=MOST)
        assert engine.forget(TEXTS[:1]) == 1
        answer = engine.generate(PROMPT, on_miss="text", max_new_tokens=MOST)
        assert answer.report.reused == len(TEXTS) - 1
        assert answer.text == self.expected(PROMPT, texts=TEXTS[1:])

    async def test_langchain_completes_and_streams(self, engine: Engine) -> None:
        llm, expected = SamKV(engine=engine, max_tokens=MOST), self.expected(PROMPT)
        assert llm.invoke(PROMPT) == await llm.ainvoke(PROMPT) == expected
        assert "".join(llm.stream(PROMPT)) == expected
        assert "".join([piece async for piece in llm.astream(PROMPT)]) == expected

    async def test_langchain_chats(self, engine: Engine) -> None:
        chat, turn = ChatSamKV(engine=engine, max_tokens=MOST), [HumanMessage(PROMPT)]
        expected = self.expected(CHAT)
        assert chat.invoke(turn).content == (await chat.ainvoke(turn)).content == expected
        assert "".join(str(piece.content) for piece in chat.stream(turn)) == expected
        pieces = [str(piece.content) async for piece in chat.astream(turn)]
        assert "".join(pieces) == expected

    async def test_llama_index_completes_and_streams(self, engine: Engine) -> None:
        llm, expected = SamKVLLM(engine=engine, max_new_tokens=MOST), self.expected(PROMPT)
        assert llm.complete(PROMPT, formatted=True).text == expected
        assert (await llm.acomplete(PROMPT, formatted=True)).text == expected
        assert [*llm.stream_complete(PROMPT, formatted=True)][-1].text == expected
        pieces = [each async for each in await llm.astream_complete(PROMPT, formatted=True)]
        assert pieces[-1].text == expected

    async def test_llama_index_chats(self, engine: Engine) -> None:
        llm, turn = SamKVLLM(engine=engine, max_new_tokens=MOST), [ChatMessage(PROMPT)]
        expected = self.expected(CHAT)
        assert llm.chat(turn).message.content == expected
        assert (await llm.achat(turn)).message.content == expected
        assert [*llm.stream_chat(turn)][-1].message.content == expected
        pieces = [each async for each in await llm.astream_chat(turn)]
        assert pieces[-1].message.content == expected

    async def test_the_server_chats(self, tmp_path: Path) -> None:
        tenancy = Tenancy(Scheduler(self.runtime(), turns=FairTurns), tmp_path)
        settings = Settings(model_name="a-model", most_tokens=300)
        app = create_app(tenancy, ApiKeys("", Tenant()), settings)
        body = {"model": "a-model", "messages": CHAT, "max_tokens": MOST,
                "samkv": {"method": "reuse"}}  # fmt: skip
        tenancy.engine(Tenant()).cache_chunks(TEXTS)
        answer = (await Client(app).posted("/v1/chat/completions", body)).body
        assert answer["choices"][0]["message"]["content"] == self.expected(CHAT)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
