"""LlamaIndex's pipelines answer from chunk caches as from full prefill, every chunk a hit.

The table is in `tests.support.llama_index_pipelines`; a few questions here, all of them in the slow
test.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from llama_index.core.response_synthesizers import ResponseMode

from tests.support.llama_index_pipelines import (
    MAX_NEW_TOKENS,
    PIPELINES,
    Library,
    answers,
    cases,
    measure,
)
from tests.support.pipelines import (
    ASPECTS,
    N_QUESTIONS,
    TOP_K,
    TURNS,
    Row,
    bodies_in,
    compared,
    questions,
)

# of LlamaIndex's agents, about themselves
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

N_OTHERS = 2
"""Questions of the quick tests; chats are asked a whole chat. They have twelve documents, as many
as those pipelines retrieve that make several calls."""
IN_EVERY_WAY = ("compact", "CondensePlusContextChatEngine")
"""Pipelines whose quick tests have chunks found in every way: those of the others find them as one
of these does."""
HANDED_OVER = (
    "compact", "ContextChatEngine", "ContextChatEngine, streaming",
    "CondensePlusContextChatEngine", "CondensePlusContextChatEngine, streaming",
)  # fmt: skip
"""Pipelines whose quick tests have answers streamed and awaited: other modes hand theirs over as
the first one does."""
NEAR_ANOTHER = (
    "compact, 8 chunks", "compact, 12 chunks",  # longer prompts
    "simple_summarize", "compact_accumulate",  # prompts of `compact` and `accumulate`
    "sentence windows, cached at ingest",
    "tree_summarize, several calls", "compact_accumulate, several calls",  # see the test of packing
)  # fmt: skip
"""Pipelines that find their chunks as another one does, which the quick tests have."""
RULE = "\n---------------------\n"
"""What LlamaIndex puts between the answers that it accumulates."""


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    library = Library(tmp_path_factory.mktemp("few"), questions(N_OTHERS))
    yield library
    library.close()


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    library = Library(tmp_path_factory.mktemp("chat"), questions(TURNS))
    yield library
    library.close()


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    """Another one like it, where no other pipeline caches what would be found in a prompt again."""
    library = Library(tmp_path_factory.mktemp("apart"), questions(N_OTHERS))
    yield library
    library.close()


@pytest.fixture(scope="module")
def all_of_them(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    library = Library(tmp_path_factory.mktemp("all"), questions(N_QUESTIONS))
    yield library
    library.close()


def expected(*, made_up: bool = False) -> list[object]:
    """Name, way and aspect of every case; where answers are made up, whether they are the same is
    luck, and no aspect."""
    return [
        pytest.param(
            name, way, aspect, id=f"{name}-{way}-{aspect}",
            marks=() if is_quick(name, way) else pytest.mark.slow,
        )
        for name, way in cases()
        for aspect in ASPECTS
        if made_up == (aspect == "same" and PIPELINES[name].excuse(way, aspect) is not None)
    ]  # fmt: skip


def is_quick(name: str, way: str) -> bool:
    if name in NEAR_ANOTHER:
        return False
    return (way == "text" or name in IN_EVERY_WAY) and PIPELINES[name].like in ("", *HANDED_OVER)


def passes(row: Row, aspect: str) -> bool:
    """As the table has it: a known failure must fail."""
    return row.passes(aspect) == (PIPELINES[row.pipeline].excuse(row.way, aspect) is None)


@pytest.mark.parametrize(("name", "way", "aspect"), expected())
def test_pipeline(
    few: Library, chat: Library, apart: Library, name: str, way: str, aspect: str
) -> None:
    library = chat if "ChatEngine" in name else few
    if aspect == "same":
        row = measure(name, library, way)
        assert row.same == row.questions == len(library.questions), row
    else:
        if PIPELINES[name].excuse(way, "same"):
            library = apart
        found = answers(name, library, way, "samkv-guided")
        row = compared(name, way, library.questions, found, found)
        assert row.questions == len(library.questions)
        assert passes(row, aspect), row


@pytest.mark.parametrize(("name", "way", "aspect"), expected(made_up=True))
def test_made_up_answers_are_the_engine_s_own(
    apart: Library, name: str, way: str, aspect: str
) -> None:
    """To the same prompts. What full prefill makes up is something else."""
    assert aspect == "same"
    for found in answers(name, apart, way, "samkv-guided"):
        own = [
            apart.engine.generate(asked, method="samkv-guided", max_new_tokens=MAX_NEW_TOKENS).text
            for asked in found.asked
        ]
        if "accumulate" in name:
            parts = [f"Response {n}: {text}" for n, text in enumerate(own, start=1)]
            assert found.answer == RULE.join(parts).strip()
        else:  # the calls before the last one made its prompt
            assert found.answer == own[-1].strip()


@pytest.mark.slow  # 50 questions to every pipeline, twice: 20 minutes on one core
@pytest.mark.parametrize(("name", "way", "aspect"), expected())
def test_pipeline_with_all_questions(
    all_of_them: Library, name: str, way: str, aspect: str
) -> None:
    row = measure(name, all_of_them, way)
    assert row.questions == N_QUESTIONS
    assert passes(row, aspect), row


def test_every_response_mode_is_in_the_table() -> None:
    without_chunks = {"no_text", "generation"}  # nothing that was retrieved reaches the model
    assert {mode.value for mode in ResponseMode} - without_chunks <= PIPELINES.keys()


def test_packing_makes_several_calls_and_loses_no_chunk(apart: Library) -> None:
    for name in ("compact", "tree_summarize", "compact_accumulate"):
        for found in answers(f"{name}, several calls", apart, "handle", "samkv-guided"):
            assert sum("[[samkv:" in prompt for prompt in found.prompts) > 1
            assert found.hits == found.given >= 3 * TOP_K


def test_chats_remember_three_turns(chat: Library) -> None:
    for kind in ("ContextChatEngine", "CondensePlusContextChatEngine"):
        *_, last = answers(kind, chat, "handle", "samkv-guided")
        first = chat.questions[0].question
        assert all(first in prompt for prompt in last.prompts)
        # the turns before are there without their chunks
        assert last.hits == TOP_K


def test_agent_reads_what_the_tool_found(few: Library) -> None:
    for found in answers("ReActAgent with RetrieverTool", few, "handle", "samkv-guided"):
        (prompt,) = found.prompts  # the tool call is scripted, and asks no model
        assert prompt.startswith("Documents:") and "Question:" in prompt
        assert bodies_in(prompt, ()) == found.hits == TOP_K
