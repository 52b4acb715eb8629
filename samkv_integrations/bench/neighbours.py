"""Questions about documents that nobody has asked any about: neighbouring chunks in one prompt."""

from __future__ import annotations

import re
from collections.abc import Sequence

from samkv_integrations.bench.data import Question
from samkv_integrations.errors import EmptyInput, InvalidOption

ASKED = "What do the documents say about this: {opening}"
"""The question. opening: how one of the chunks begins."""

OPENING_CHARACTERS = 80
"""Longest opening. Characters, as not every language parts its words."""

_SENTENCE_END = re.compile(r"(?<=[.!?])\s|[。！？]|\n")


def opening(text: str) -> str:
    """The title or first sentence of a chunk, without the marks of a heading, at most so long."""
    line = _SENTENCE_END.split(text.strip().lstrip("#").strip(), maxsplit=1)[0].strip()
    if len(line) <= OPENING_CHARACTERS:
        return line
    cut = line[:OPENING_CHARACTERS]
    return cut[: cut.rfind(" ")] if " " in cut else cut


def neighbour_questions(chunks: Sequence[str], n_documents: int, name: str) -> list[Question]:
    """A question about each run of ``n_documents`` neighbouring ``chunks``, without answers.

    It asks for what one of them begins with, each place in turn. The last run may be shorter; a
    single chunk is left out, as no other stands before it. Equal chunks count once. name: of the
    data, and what ids begin with.

    Raises:
        InvalidOption: ``n_documents`` is less than 2.
        EmptyInput: there are fewer than two chunks.
    """
    if n_documents < 2:
        raise InvalidOption(
            f"documents={n_documents}; it must be at least 2 for a folder, as what is measured is "
            "what chunks lack of each other"
        )
    distinct = list(dict.fromkeys(chunks))
    runs = [distinct[at : at + n_documents] for at in range(0, len(distinct), n_documents)]
    found = []
    for number, run in enumerate(runs):
        if len(run) > 1:
            place = number % len(run)
            question = ASKED.format(opening=opening(run[place]))
            found.append(
                Question(
                    id=f"{name}:{number + 1}", dataset=name, kind=name, question=question,
                    answers=(), documents=tuple(run), supporting=(place,),
                )
            )  # fmt: skip
    if not found:
        raise EmptyInput(
            f"{name} makes {len(distinct)} chunk; give more text, or a smaller chunk size"
        )
    return found
