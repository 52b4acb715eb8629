"""LangChain's chains answer from chunk caches as from full prefill, every chunk a hit.

The table is in `tests.support.langchain_chains`; a few questions here, all of them in the slow
test.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, get_args

import pytest
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough

from langchain_samkv import SamKVDocumentCompressor, format_docs
from langchain_samkv.documents import Mode
from samkv_integrations.errors import TimedOut
from tests.support.handles import HANDLE
from tests.support.langchain_chains import (
    CHAINS,
    TEMPLATE,
    Library,
    Setting,
    answers,
    join,
    lcel,
    measure,
)
from tests.support.pipelines import N_QUESTIONS, TOP_K, TURNS, questions, recorded

# of LangChain, about classes that it still ships and people still use
pytestmark = pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainDeprecationWarning")

ASKED_OF = [(name, aspect) for name, chain in CHAINS.items() for aspect in chain.aspects]

FEW = TURNS
"""Questions of the quick tests: one whole chat."""


@pytest.fixture(scope="module")
def few() -> Library:
    return Library(questions(FEW))


@pytest.fixture(scope="module")
def all_of_them() -> Library:
    return Library(questions(N_QUESTIONS))


@pytest.fixture(scope="module")
def ours(few: Library) -> Setting:
    return Setting(library=few, method="samkv-guided")


ALIKE = ("LCEL, f-string, ainvoke", "LCEL, f-string, astream", "LCEL, mustache {{ }}",
         "LCEL, jinja2", "RunnableWithMessageHistory, stream")  # fmt: skip
"""Chains that differ from another one by what the batches or the other templates differ by, too."""


@pytest.mark.parametrize(
    ("name", "aspect"),
    [
        pytest.param(*asked, marks=pytest.mark.slow if asked[0] in ALIKE else ())
        for asked in ASKED_OF
    ],
)
def test_chain(few: Library, name: str, aspect: str) -> None:
    row = measure(name, few)
    assert row.questions == FEW
    if aspect == "same":
        assert row.same == row.right == FEW, row
    else:
        assert row.passes(aspect) != (aspect == "handles" and CHAINS[name].shows_handles), row


@pytest.mark.slow  # 50 questions to every chain, twice: 5 minutes on one core
@pytest.mark.parametrize(("name", "aspect"), ASKED_OF)
def test_chain_with_all_questions(all_of_them: Library, name: str, aspect: str) -> None:
    row = measure(name, all_of_them)
    assert row.questions == N_QUESTIONS
    assert row.passes(aspect) != (aspect == "handles" and CHAINS[name].shows_handles), row


def test_batches_of_different_questions(few: Library, ours: Setting) -> None:
    chain = lcel(ours, ChatPromptTemplate.from_template(TEMPLATE), ours.chat())
    asked = [question.question for question in few.questions] * 2
    one_by_one = [chain.invoke(question) for question in asked]
    assert len(set(one_by_one)) == FEW
    with recorded() as calls:
        assert chain.batch(asked) == one_by_one
        assert asyncio.run(chain.abatch(asked)) == one_by_one
        assert [call().hits for call in calls] == [TOP_K] * 4 * FEW


def test_chats_remember_three_turns(few: Library) -> None:
    for name in ("RunnableWithMessageHistory", "LangGraph, checkpointed"):
        *_, last = answers(name, few, "samkv-guided")
        (prompt,) = last.prompts
        assert all(question.question in prompt for question in few.questions)
        assert last.hits == TOP_K  # the turns before are there without their chunks


class TestTemplates:
    TEXT = 'R&D is <b>"Orvik & Sons"</b>, a company of 4182 people. It makes the Fivane printer.'
    QUESTION = "How many people work at Orvik & Sons?"

    def answer(self, ours: Setting, template_format: Any, brackets: str) -> Any:
        ours.library.engine.cache_chunks([self.TEXT])
        left, right = brackets.split()
        prompt = ChatPromptTemplate.from_messages(
            [("human", TEMPLATE.replace("{", left).replace("}", right))],
            template_format=template_format,
        )
        given = {"context": self.TEXT, "question": "How many people work there?"}
        with recorded() as calls:
            message = (prompt | ours.chat()).invoke(given)
        (call,) = (call() for call in calls)
        full = Setting(library=ours.library, method="recompute")
        assert message.content == (prompt | full.chat()).invoke(given).content
        return call

    @pytest.mark.parametrize(
        ("template_format", "brackets"),
        [("f-string", "{ }"), ("mustache", "{{{ }}}"), ("jinja2", "{{ }}")],
    )
    def test_verbatim(self, ours: Setting, template_format: str, brackets: str) -> None:
        call = self.answer(ours, template_format, brackets)
        assert self.TEXT in call.prompt
        assert (call.hits, call.misses) == (1, 0)

    @pytest.mark.parametrize(
        ("template_format", "brackets", "written"),
        [("mustache", "{{ }}", "R&amp;D"), ("jinja2", "{{ |tojson}}", "R\\u0026D")],
    )
    def test_escaped(
        self, ours: Setting, template_format: str, brackets: str, written: str
    ) -> None:
        """What the escapes leave as it was is taken from the cache, the rest is computed."""
        call = self.answer(ours, template_format, brackets)
        assert written in call.prompt and self.TEXT not in call.prompt
        assert call.misses == 0


class TestFallbacks:
    @pytest.mark.parametrize("mode", get_args(Mode))
    def test_to_another_model(self, few: Library, ours: Setting, mode: Mode) -> None:
        """It reads what ours would have read: texts by default, and handles in the other modes."""
        compressor = SamKVDocumentCompressor(
            engine=few.engine, **({} if mode == "text" else {"mode": mode})
        )
        seen: list[Any] = []

        def other(prompt: Any) -> AIMessage:
            seen.append(prompt.to_string())
            return AIMessage("the other model")

        llm = ours.chat(timeout=1e-9).with_fallbacks(
            [RunnableLambda(other)], exceptions_to_handle=(TimedOut,)
        )
        context = ours.retriever() | compressor.compress_documents
        inputs = {
            "context": context | partial(format_docs, handles=mode == "metadata"),
            "question": RunnablePassthrough(),
        }
        chain = inputs | ChatPromptTemplate.from_template(TEMPLATE) | llm | StrOutputParser()
        asked = few.questions[0].question
        documents = ours.retriever().invoke(asked)
        assert chain.invoke(asked) == "the other model"
        texts = f"Human: {TEMPLATE.format(context=join(documents), question=asked)}"
        if mode == "text":
            assert seen == [texts] and not HANDLE.search(texts)
        else:
            assert len(HANDLE.findall(seen[0])) == TOP_K

    def test_from_another_model(self, few: Library, ours: Setting) -> None:
        def fail(prompt: Any) -> AIMessage:
            raise ConnectionError

        llm = RunnableLambda(fail).with_fallbacks([ours.chat()])
        chain = lcel(ours, ChatPromptTemplate.from_template(TEMPLATE), llm)
        question = few.questions[0]
        with recorded() as calls:
            assert question.answers[0] in chain.invoke(question.question)
        assert [call().hits for call in calls] == [TOP_K]
