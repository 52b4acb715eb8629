"""Questions to tune with: of a file, or made of the chunks themselves, in any language."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from samkv_integrations.bench.data import Question

_BRACKETED = re.compile(r"\[([^\[\]\n]{1,120})\]")
_HEADING = re.compile(r"#{1,6}\s+(.{1,120})")
_END = re.compile(r"(?<=[.!?…])\s+|(?<=[。！？])|\n+")
_LEAST_WORDS, _LEAST_CHARACTERS = 4, 8
"""Of a sentence that a question is made of."""


def from_chunks(texts: Sequence[str], *, seed: int) -> list[Question]:
    """Questions made of chunks: ``TITLE?`` and ``TITLE: beginning of a sentence ...?``.

    They ask for what a chunk says, in its own words, so that retrieval finds it, and need no
    knowledge of its language. Chunks take turns, in an order that follows from the seed. A text
    without a title asks by its sentences alone.
    """
    order = random.Random(seed)
    of_chunks = []
    for place in order.sample(range(len(texts)), len(texts)):
        asked = list(dict.fromkeys(_of_chunk(texts[place])))
        of_chunks.append(order.sample(asked, len(asked)))
    turns = [text for turn in zip_longest(*of_chunks) for text in turn if text is not None]
    return [_question(f"chunks-{text}", text) for text in dict.fromkeys(turns)]


def shuffled(questions: Sequence[Question], *, seed: int) -> list[Question]:
    """The questions in an order that follows from the seed."""
    return random.Random(seed).sample(list(questions), len(questions))


def _question(id_: str, text: str) -> Question:
    return Question(
        id=id_, dataset="chunks", kind="chunks", question=text, answers=(), documents=()
    )


def _of_chunk(text: str) -> Iterator[str]:
    title, rest = split_title(text)
    if title:
        yield f"{title}?"
    for sentence in _END.split(rest):
        if beginning := half_of(sentence.strip()):
            yield f"{title}: {beginning} ...?" if title else f"{beginning} ...?"


def split_title(text: str) -> tuple[str, str]:
    """The title of a chunk, "" for none, and what follows it.

    ``[Title]`` or ``# Title`` on the first line.
    """
    first, _, rest = text.strip().partition("\n")
    found = _BRACKETED.fullmatch(first.strip()) or _HEADING.fullmatch(first.strip())
    return (found[1].strip(), rest) if found else ("", text)


def half_of(sentence: str) -> str:
    """The first half of a sentence, by words, or by characters where nothing parts words.

    Empty for one that is too short to be told from others by its beginning.
    """
    words = sentence.split()
    if len(words) >= _LEAST_WORDS:
        return " ".join(words[: (len(words) + 1) // 2])
    if len(words) == 1 and len(sentence) >= _LEAST_CHARACTERS and not sentence.isascii():
        return sentence[: len(sentence) // 2]
    return ""
