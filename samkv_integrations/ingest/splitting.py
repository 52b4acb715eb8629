"""Splits the text of a page into chunks."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise

from samkv_integrations.errors import Given, InvalidOption, MissingExtra
from samkv_integrations.ingest.documents import is_markdown
from samkv_integrations.runtimes.base import Runtime
from samkv_integrations.store.chunk import normalise
from samkv_integrations.store.windows import MIN_RUN


def check_overlap(overlap: int, chunk_size: int) -> None:
    """Raises InvalidOption if ``overlap`` is negative, or more than half of a chunk."""
    most = chunk_size // 2
    if not 0 <= overlap <= most:
        raise InvalidOption(
            Given("overlap", overlap), f"; it must be 0 to {most}, half of a chunk of {chunk_size}"
        )


def split(body: str, suffix: str, model: Runtime, chunk_size: int, overlap: int = 0) -> list[str]:
    """The chunks of a page of a file with this suffix; none if it has no text.

    A short piece, such as a heading, is joined to the piece after it, else to the one before.

    chunk_size: most tokens of a chunk. overlap: most tokens, in whole words, with which a chunk
    repeats the end of the one before.

    Raises InvalidOption as `check_overlap` does, MissingExtra if the splitter is not installed.
    """
    check_overlap(overlap, chunk_size)

    def n_tokens(text: str) -> int:
        return len(model.tokenize(text, special=False))

    may_fit = len(body) <= chunk_size * model.longest_token  # a long text takes its time to count
    if may_fit and n_tokens(body) <= chunk_size:
        return [body] if body else []
    try:
        from semantic_text_splitter import MarkdownSplitter, TextSplitter
    except ImportError as error:
        raise MissingExtra.of("semantic-text-splitter", "chroma") from error
    kind = MarkdownSplitter if is_markdown(suffix) else TextSplitter
    few, room = chunk_size // 8, chunk_size - overlap  # each piece leaves room for few tokens
    fast, size = model.fast_tokenizer, room - few
    if fast is None:
        splitter = kind.from_callback(n_tokens, size)
    else:
        splitter = kind.from_huggingface_tokenizer(fast, size)
    pieces = [
        (start + at, piece)
        for start, end in _parts(body)
        for at, piece in splitter.chunk_indices(body[start:end])
    ]
    joined: list[tuple[int, int]] = []  # characters from and to, the last piece first
    for begin, piece in reversed(pieces):
        end = begin + len(piece)
        if joined:
            after = body[slice(*joined[-1])]
            is_short = min(n_tokens(piece), n_tokens(after)) < max(MIN_RUN, few)
            if is_short and n_tokens(body[begin : joined[-1][1]]) <= room:
                end = joined.pop()[1]
        joined.append((begin, end))
    joined.reverse()
    if overlap:
        firsts = [begin for begin, _ in joined[:1]]
        for begin, end in joined[1:]:
            before = firsts[-1]
            firsts.append(_overlapping(body, before, begin, end, overlap, chunk_size, n_tokens))
        joined = [(first, end) for first, (_, end) in zip(firsts, joined, strict=True)]
    return list(filter(None, (normalise(body[begin:end]) for begin, end in joined)))


def _overlapping(
    body: str, before: int, begin: int, end: int, overlap: int, chunk_size: int,
    n_tokens: Callable[[str], int],
) -> int:  # fmt: skip
    """Where the chunk at ``begin`` to ``end`` begins with the overlap. before: the one before."""
    words = [before + word.start() for word in re.finditer(r"\S+", body[before:begin])]

    def fits(word: int) -> bool:
        is_few = n_tokens(normalise(body[word:begin])) <= overlap
        return is_few and n_tokens(normalise(body[word:end])) <= chunk_size

    at = bisect_left(words, True, key=fits)  # the more words, the more tokens
    return words[at] if at < len(words) else begin


_MOST_UNBROKEN = 2000
"""Most characters of a run without white space that is not cut.

The time of the splitter grows with the square of such a run: 22 s for an image of 400 kB as base64.
"""

_MOST_AT_ONCE = 100_000
"""Characters after which a text is cut, at the next line: the splitter cannot be interrupted."""


def _parts(body: str) -> list[tuple[int, int]]:
    """Where the parts of a text begin and end: none is very long, or has a long unbroken run."""
    cuts = {0, len(body)}
    for run in re.finditer(rf"(?<!\S)\S{{{_MOST_UNBROKEN},}}", body):
        cuts.update(range(run.start() + _MOST_UNBROKEN, run.end(), _MOST_UNBROKEN))
    at = 0
    while (least := at + _MOST_AT_ONCE) < len(body):
        places = (body.find(space, least, least + _MOST_AT_ONCE) for space in ("\n", " "))
        at = next((place for place in places if place >= 0), least)
        cuts.add(at)
    return list(pairwise(sorted(cuts)))
