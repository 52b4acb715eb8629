"""LangChain's chains answer from chunk caches as from full prefill, every chunk a hit."""

from __future__ import annotations

import asyncio

import pytest
from langchain_core.prompts import ChatPromptTemplate

from tests.support.langchain_chains import CHAINS, TEMPLATE, Library, Setting, lcel
from tests.support.pipelines import (
    HANDLE,
    TOP_K,
    TURNS,
    assert_answers_from_caches,
    holds,
    questions,
    recorded,
)
from tests.support.tested_runtime import ON_LLAMA_CPP

# of LangChain, about classes that it still ships and people still use
pytestmark = pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainDeprecationWarning")

FEW = TURNS
"""Questions: one whole chat."""


@pytest.fixture(scope="module")
def few() -> Library:
    return Library(questions(FEW))


@pytest.fixture(scope="module")
def ours(few: Library) -> Setting:
    return Setting(library=few, method="samkv-guided")


@pytest.mark.parametrize("name", CHAINS)
def test_chain(few: Library, ours: Setting, name: str) -> None:
    full = Setting(library=few, method="recompute")
    found = assert_answers_from_caches(
        few.questions, CHAINS[name](ours), CHAINS[name](full),
        shows_handles=name == "create_retrieval_chain, compressor",
    )  # fmt: skip
    for one, question in zip(found, few.questions, strict=True):
        assert ON_LLAMA_CPP or holds(one.answer, question.answers)
    for one in found if "compressor" in name else ():
        (prompt,) = one.prompts
        assert len(HANDLE.findall(prompt)) == TOP_K  # its hits are not those of texts
    if name in ("RunnableWithMessageHistory", "LangGraph, checkpointed"):
        (prompt,) = found[-1].prompts
        assert all(question.question in prompt for question in few.questions)
        assert found[-1].hits == TOP_K  # the turns before are there without their chunks


def test_batches_of_different_questions(few: Library, ours: Setting) -> None:
    chain = lcel(ours, ChatPromptTemplate.from_template(TEMPLATE), ours.chat())
    asked = [question.question for question in few.questions] * 2
    one_by_one = [chain.invoke(question) for question in asked]
    assert len(set(one_by_one)) == FEW
    with recorded() as calls:
        assert chain.batch(asked) == one_by_one
        assert asyncio.run(chain.abatch(asked)) == one_by_one
        assert [call().hits for call in calls] == [TOP_K] * 4 * FEW
