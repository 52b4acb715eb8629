"""Questions get the chunks that are asked about, or are left out and counted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from samkv_integrations.chroma.embedding import HashingEmbedding
from samkv_integrations.chroma.link import ChromaLink
from samkv_integrations.errors import EmptyInput
from samkv_integrations.lab import tuning
from samkv_integrations.lab.evaluation import Question
from samkv_integrations.lab.tuning import Retrieved, with_documents
from tests.support.chroma_link import link_of

TEXTS = ["[Hesmere]\nHesmere lies on the Hidow.", "[Kronstead]\nKronstead lies on the Ava."]


@pytest.fixture
def link(tmp_path: Path) -> ChromaLink:
    made = link_of(tmp_path)
    made.add(["b", "a"], TEXTS, HashingEmbedding().embed(TEXTS))
    return made


def question(text: str, *documents: str) -> Question:
    return Question(id=text, question=text, documents=documents)


def ready(link: ChromaLink, asked: Sequence[Question], new: int = 4) -> Retrieved:
    return with_documents(link, asked, top_k=1, max_new_tokens=new, chat=False)


def test_a_question_gets_what_is_nearest_and_keeps_what_it_brings(
    link: ChromaLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [question("Where is Kronstead?"), question("Where is Hesmere?", TEXTS[1])] * 3
    found = ready(link, asked).questions
    assert [one.documents for one in found] == [(TEXTS[1],)] * 6
    monkeypatch.setattr(tuning, "MOST_QUESTIONS", 5)
    assert len(ready(link, asked).questions) == 5


def test_what_cannot_be_measured_is_left_out_and_counted(link: ChromaLink) -> None:
    asked = [question("Where is Hesmere?")] * 5
    asked += [question("Where?", "a text that nobody has cached")]
    found = ready(link, asked)
    assert {one.question for one in found.questions} == {"Where is Hesmere?"}
    assert (found.uncached, found.too_long) == (1, 0)
    with pytest.raises(EmptyInput, match="of 5 questions 4 can be asked, and 5 are needed; 0 are"):
        ready(link, asked[1:])
    window = link.engine.model.context_window
    with pytest.raises(EmptyInput, match="of 1 questions 0 can be asked, and 5 are needed; 1 are"):
        ready(link, asked[:1], new=window)
