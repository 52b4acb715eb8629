"""Questions to tune with: made of the chunks, in any language, or given; and their documents."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from samkv_integrations.chroma.link import ChromaLink, nearest
from samkv_integrations.chroma.records import Records
from samkv_integrations.errors import EmptyInput
from samkv_integrations.evaluation.questions import Question
from samkv_integrations.figures import count

MOST_CHUNKS = 2_000
"""Chunks that questions are made of: the first ones of a collection."""


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
    return [Question(id=f"chunks-{text}", question=text) for text in dict.fromkeys(turns)]


def distinct(questions: Sequence[Question]) -> list[Question]:
    """Each question over the same documents once: a second answer would say nothing new."""
    found: dict[object, Question] = {}
    for one in questions:
        found.setdefault((one.question, one.documents), one)
    return list(found.values())


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


def texts_of(link: ChromaLink, most: int = MOST_CHUNKS) -> list[str]:
    """The texts of a collection's first records, each once."""
    records, texts = Records(link.collection), dict[str, None]()
    ids = sorted(records.ids(None))[:most]
    for part in records.slices(len(ids)):
        rows = records.read(records.collection, ids=ids[part], include=["documents"])
        at = dict(zip(rows["ids"], rows["documents"] or (), strict=True))
        texts |= dict.fromkeys(at[id_] or "" for id_ in ids[part] if id_ in at)
    return [text for text in texts if text.strip()]


@dataclass(frozen=True, kw_only=True)
class Retrieved:
    """Questions with their documents, and how many were left out.

    too_long: prompt and answer exceed the context window. uncached: a chunk has no cache, so there
    is nothing to measure.
    """

    questions: Sequence[Question]
    too_long: int
    uncached: int


def with_documents(
    link: ChromaLink,
    asked: Sequence[Question],
    *,
    top_k: int,
    max_new_tokens: int,
    chat: bool,
    most: int,
) -> Retrieved:
    """The first ``most`` questions that can be asked, each with its nearest chunks.

    A question that has documents keeps them: another retriever has found them.

    Raises EmptyInput if there is none, else as `nearest` does.
    """
    found: list[Question] = []
    engine, too_long, uncached = link.engine, 0, 0
    for question in asked:
        if len(found) == most:
            break
        documents = question.documents or tuple(
            one.text for one in nearest(link, question.question, top_k)
        )
        ready = replace(question, documents=documents, max_new_tokens=max_new_tokens)
        chunks = engine.chunks.refer(documents)
        if len(ready.prompt_ids(engine.model, chat=chat)) + max_new_tokens > (
            engine.model.context_window
        ):
            too_long += 1
        elif any(ref.state != "cached" for ref in engine.chunks.look_up(chunks, "exists")):
            uncached += 1
        else:
            found.append(ready)
    if not found:
        raise EmptyInput(
            f"of {count(len(asked), 'question')} none can be asked: {too_long} too long for the "
            f"context window, {uncached} with chunks without a cache; retrieve fewer chunks with "
            "--top-k, or run 'samkv store sync'"
        )
    return Retrieved(questions=found, too_long=too_long, uncached=uncached)
