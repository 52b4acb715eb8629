"""Structured predictions of LlamaIndex from a model whose weights are random."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from llama_index.core import Document, SummaryIndex
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from pydantic import BaseModel, Field

from llama_index.llms.samkv import SamKVLLM
from samkv_integrations import Engine
from samkv_integrations.errors import AnswerCut
from tests.support.models import quoting_model

PROMPT = PromptTemplate("{document}\n\nWhere was {name} born?")
GIVEN = {"document": "", "name": "Tobias Trulman"}
DOCUMENT = "[Tobias Trulman] Tobias Trulman was born in Flevport, a town on the Tume."


class Town(BaseModel):
    """A town."""

    name: str = Field(max_length=8)
    kind: Literal["port", "mine"]


class Birth(BaseModel):
    """Who was born where."""

    town: Town
    year: int | None = Field(default=None, ge=0, le=2100)


def llm_with(**options: Any) -> SamKVLLM:
    sampling = {"temperature": 1.0, "seed": 3} | options.pop("generate_kwargs", {})
    given = {"max_new_tokens": 200, "generate_kwargs": sampling} | options
    return SamKVLLM(engine=Engine(quoting_model(), method="reuse"), **given)


@pytest.fixture(scope="module")
def llm() -> SamKVLLM:
    return llm_with()


def test_structured_predict(llm: SamKVLLM) -> None:
    for seed in range(5):
        found = llm.structured_predict(Birth, PROMPT, {"seed": seed}, **GIVEN)
        assert isinstance(found, Birth)


def test_stream(llm: SamKVLLM) -> None:
    chunks = list(llm.stream_structured_predict(Town, PROMPT, **GIVEN))
    assert len(chunks) > 2
    assert chunks[-1] == llm.structured_predict(Town, PROMPT, **GIVEN)


def test_structured_llm(llm: SamKVLLM) -> None:
    structured = llm.as_structured_llm(Town)
    assert isinstance(structured.complete("Where?").raw, Town)
    assert isinstance(structured.chat([ChatMessage(content="Where?")]).raw, Town)


def test_query_engine(llm: SamKVLLM) -> None:
    """A cached document is answered from its cache in such a call, too."""
    llm.engine.cache_chunks([DOCUMENT])
    index = SummaryIndex.from_documents([Document(text=DOCUMENT)])
    engine = index.as_query_engine(llm=llm.as_structured_llm(Town), response_mode="compact")
    assert Town.model_validate_json(str(engine.query("Where was he born?")))
    assert llm.last_report is not None and llm.last_report.reused == 1


def test_a_plain_model() -> None:
    plain = llm_with(is_chat_model=False)
    assert isinstance(plain.structured_predict(Town, PROMPT, **GIVEN), Town)


def test_one_that_was_cut() -> None:
    short = llm_with(max_new_tokens=9)
    reason = "cut after 9 tokens, before its JSON was complete; give more max_new_tokens"
    with pytest.raises(AnswerCut, match=reason):
        short.structured_predict(Town, PROMPT, **GIVEN)
    with pytest.raises(AnswerCut, match=reason):
        list(short.stream_structured_predict(Town, PROMPT, **GIVEN))
    assert len(short.complete("Where?").text) > 0
