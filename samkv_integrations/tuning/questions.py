"""The questions of ``samkv tune``: given, or made of the chunks of a collection in any language."""

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
from samkv_integrations.formatting import count

MOST_CHUNKS = 2_000
"""Questions are made of the first chunks of a collection, at most so many."""

_BRACKETED = re.compile(r"\[([^\[\]\n]{1,120})\]")
_HEADING = re.compile(r"#{1,6}\s+(.{1,120})")
_END = re.compile(r"(?<=[.!?…])\s+|(?<=[。！？])|\n+")
_EDGES = re.compile(r"^\W+|\W+$")
_LEAST_WORDS, _LEAST_CHARACTERS = 3, 8
"""A question shows at least so many words of its sentence. A sentence of a language without spaces
has at least so many characters."""


def from_chunks(texts: Sequence[str], *, seed: int) -> list[Question]:
    """Make questions of chunks: ``TITLE?`` and ``TITLE: beginning of a sentence ...?``.

    A sentence is cut before its rarest word, the one that occurs in the fewest chunks, because that
    word tells this chunk from all others. Such a question uses the chunk's own words, so retrieval
    finds the chunk, and making it needs no knowledge of the language. Chunks take turns, in an
    order given by ``seed``. Each chunk begins with the sentences of its rarest words.
    """
    spread = Counter(word for text in texts for word in set(_words(text)))
    order = random.Random(seed)
    of_chunks = []
    for place in order.sample(range(len(texts)), len(texts)):
        rated = sorted(_of_chunk(texts[place], spread), key=lambda one: (one[0], order.random()))
        of_chunks.append([text for _, text in rated])
    turns = [text for turn in zip_longest(*of_chunks) for text in turn if text is not None]
    return [Question(question=text) for text in dict.fromkeys(turns)]


def _words(text: str) -> Iterator[str]:
    """The words of a text, in lower case and without punctuation around them."""
    return (bare for word in text.split() if (bare := _EDGES.sub("", word).lower()))


def _of_chunk(text: str, spread: Mapping[str, int]) -> Iterator[tuple[int, str]]:
    """The questions of a chunk, each with the number of chunks that have the word asked for."""
    title, rest = split_title(text)
    named = set(_words(title))
    for sentence in _END.split(rest):
        n_chunks, beginning = before_rarest(sentence.strip(), spread, named)
        if beginning:
            known = not title or title.lower() in beginning.lower()
            yield n_chunks, f"{beginning} ...?" if known else f"{title}: {beginning} ...?"
    if title:
        yield len(spread), f"{title}?"  # last, because its answer is the least certain


def split_title(text: str) -> tuple[str, str]:
    """The title of a chunk and the text after it; the title is "" if there is none.

    A title is a first line of the form ``[Title]`` or ``# Title``.
    """
    first, _, rest = text.strip().partition("\n")
    found = _BRACKETED.fullmatch(first.strip()) or _HEADING.fullmatch(first.strip())
    return (found[1].strip(), rest) if found else ("", text)


def before_rarest(
    sentence: str, spread: Mapping[str, int], named: set[str] | frozenset[str] = frozenset()
) -> tuple[int, str]:
    """The number of chunks that have the sentence's rarest word, and the text before that word.

    The text is "" if the sentence is too short. Of a sentence without spaces, as in Chinese, the
    text is the first half.

    spread: word -> number of chunks that have it. named: words of the title, which are not asked
    for.
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


def texts_of(link: ChromaLink) -> list[str]:
    """The texts of the first `MOST_CHUNKS` records of a collection, without repetitions."""
    records, texts = Records(link.collection), dict[str, None]()
    ids = sorted(records.ids(None))[:MOST_CHUNKS]
    for part in records.slices(len(ids)):
        rows = records.read(records.collection, ids=ids[part], include=["documents"])
        at = dict(zip(rows["ids"], rows["documents"] or (), strict=True))
        texts |= dict.fromkeys(at[id_] or "" for id_ in ids[part] if id_ in at)
    return [text for text in texts if text.strip()]


@dataclass(frozen=True, kw_only=True)
class Retrieved:
    """Questions with their documents, and how many questions were left out, by reason.

    too_long: prompt and answer exceed the context window. uncached: a chunk has no cache, so a
    method has nothing to reuse.
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
    """Retrieve the ``top_k`` nearest chunks for each question, until ``most`` can be asked.

    A question that brings its own documents keeps them.

    Raises EmptyInput if no question can be asked, else as `nearest` does.
    """
    found: list[Question] = []
    engine, too_long, uncached = link.engine, 0, 0
    for question in asked:
        if len(found) == most:
            break
        documents = question.documents or tuple(
            one.text for one in nearest(link, question.question, top_k)
        )
        ready = replace(question, documents=documents)
        chunks = engine.chunks.refer(documents)
        n_tokens = len(ready.prompt_ids(engine.model, chat=chat)) + max_new_tokens
        if n_tokens > engine.model.context_window:
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
