"""Questions to tune with: of a file, or made of the chunks themselves, in any language."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from samkv_integrations.bench.data import Question

_BRACKETED = re.compile(r"\[([^\[\]\n]{1,120})\]")
_HEADING = re.compile(r"#{1,6}\s+(.{1,120})")
_END = re.compile(r"(?<=[.!?…])\s+|(?<=[。！？])|\n+")
_EDGES = re.compile(r"^\W+|\W+$")
_LEAST_WORDS, _LEAST_CHARACTERS = 3, 8
"""Of a sentence that a question is made of: words before the one that is left out, and characters
where nothing parts words."""


def from_chunks(texts: Sequence[str], *, seed: int) -> list[Question]:
    """Questions made of chunks: ``TITLE?`` and ``TITLE: beginning of a sentence ...?``.

    A sentence ends before its rarest word, the one that the fewest chunks have: that is what it
    says of this chunk and of no other. So questions ask for what a chunk says, in its own words,
    which retrieval finds, and need no knowledge of its language. Chunks take turns, in an order
    that follows from the seed, and each begins with the sentences of its rarest words.
    """
    spread = Counter(word for text in texts for word in set(_words(text)))
    order = random.Random(seed)
    of_chunks = []
    for place in order.sample(range(len(texts)), len(texts)):
        rated = sorted(_of_chunk(texts[place], spread), key=lambda one: (one[0], order.random()))
        of_chunks.append([text for _, text in rated])
    turns = [text for turn in zip_longest(*of_chunks) for text in turn if text is not None]
    return [_question(f"chunks-{text}", text) for text in dict.fromkeys(turns)]


def distinct(questions: Sequence[Question]) -> list[Question]:
    """Each question over the same documents once: a second answer would say nothing new."""
    found: dict[object, Question] = {}
    for one in questions:
        found.setdefault((one.question, one.documents), one)
    return list(found.values())


def shuffled(questions: Sequence[Question], *, seed: int) -> list[Question]:
    """The questions in an order that follows from the seed."""
    return random.Random(seed).sample(list(questions), len(questions))


def _question(id_: str, text: str) -> Question:
    return Question(
        id=id_, dataset="chunks", kind="chunks", question=text, answers=(), documents=()
    )


def _words(text: str) -> Iterator[str]:
    """Words as they are counted: in lower case, without what stands around them."""
    return (bare for word in text.split() if (bare := _EDGES.sub("", word).lower()))


def _of_chunk(text: str, spread: Mapping[str, int]) -> Iterator[tuple[int, str]]:
    """Questions of a chunk, each with the number of chunks that have the word asked for."""
    title, rest = split_title(text)
    named = set(_words(title))
    for sentence in _END.split(rest):
        n_chunks, beginning = before_rarest(sentence.strip(), spread, named)
        if beginning:
            known = not title or title.lower() in beginning.lower()
            yield n_chunks, f"{beginning} ...?" if known else f"{title}: {beginning} ...?"
    if title:
        yield len(spread), f"{title}?"  # the last: it asks for nothing certain


def split_title(text: str) -> tuple[str, str]:
    """The title of a chunk, "" for none, and what follows it.

    ``[Title]`` or ``# Title`` on the first line.
    """
    first, _, rest = text.strip().partition("\n")
    found = _BRACKETED.fullmatch(first.strip()) or _HEADING.fullmatch(first.strip())
    return (found[1].strip(), rest) if found else ("", text)


def before_rarest(
    sentence: str, spread: Mapping[str, int], named: set[str] | frozenset[str] = frozenset()
) -> tuple[int, str]:
    """In how many chunks the rarest word of a sentence is, and what stands before it.

    Words of the title count as everywhere. Where nothing parts words, the first half of the
    characters. The text is empty if there is too little before the word.

    spread: word -> chunks that have it. named: words of the title.
    """
    words = sentence.split()
    if len(words) == 1 and not sentence.isascii() and len(sentence) >= _LEAST_CHARACTERS:
        return 1, sentence[: len(sentence) // 2]
    rated = []
    for place, word in enumerate(words):
        bare = _EDGES.sub("", word).lower()
        if bare and bare not in named and place >= _LEAST_WORDS:
            rated.append((spread.get(bare, 1), -place))
    if not rated:
        return 0, ""
    n_chunks, place = min(rated)
    return n_chunks, " ".join(words[:-place])
