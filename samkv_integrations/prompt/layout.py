"""The layout of a prompt: the runs of tokens that chunks have in it, their positions and blocks.

docs/architecture.md has the legend of shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samkv_integrations.store.base import StoredChunk
from samkv_integrations.store.chunk import ChunkBlocks
from samkv_integrations.store.windows import MIN_RUN, ChunkIndex, Ids

Numbers = NDArray[np.int64]
Mask = NDArray[np.bool_]

_MOST_COMPARED = 64
"""Limit of comparisons per id of a prompt. Beyond it chunks are text: some may be adversarial."""


@dataclass(frozen=True, order=True)
class Run:
    """Token ids ``[start, stop)`` of a chunk, which a prompt contains from ``position`` on."""

    position: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def span(self) -> range:
        """Positions in the prompt."""
        return range(self.position, self.position + len(self))


@dataclass(kw_only=True)
class PromptChunk:
    """A chunk in a prompt: its consecutive runs that the prompt contains, and its cache.

    It has several runs if a template indents or quotes the chunk's lines. A chunk may occur twice.

    index: number of the index that has the chunk. key: the chunk's key in that index, later that of
    its cache; empty until the first look-up. token_ids: of the whole chunk. text: None if only the
    store knows it. stored: its cache; None if there is no usable one.
    computed_now: whether the cache was computed for this prompt.
    """

    index: int
    key: str
    token_ids: tuple[int, ...]
    runs: tuple[Run, ...]
    text: str | None = None
    stored: StoredChunk | None = None
    computed_now: bool = False

    @property
    def n_tokens(self) -> int:
        """Number of its tokens that occur in the prompt."""
        return sum(map(len, self.runs))

    @property
    def is_whole(self) -> bool:
        """Whether the prompt contains all of it, except edges that merged with their neighbours."""
        n_edge, run = 2, self.runs[0]
        at_edges = run.start <= n_edge and run.stop >= len(self.token_ids) - n_edge
        return len(self.runs) == 1 and at_edges


def find_runs(ids: Sequence[int], indexes: Sequence[ChunkIndex]) -> list[PromptChunk]:
    """The chunks in a prompt, in order.

    Every run is maximal, and has at least `MIN_RUN` ids. Where two runs overlap, the run of the
    earlier index wins, and within one index the longer run. The rest of the other run counts if it
    is long enough. Time grows with the length of the prompt, not with the number of chunks.
    """
    prompt = np.asarray(ids, np.int32)
    owner = np.full(len(prompt), -1)  # of each id: the index that has taken it
    found: list[tuple[Run, int, str, Ids]] = []
    for number, index in enumerate(indexes):
        candidates = _candidates(prompt, owner, index)
        for run, key, chunk in sorted(candidates, key=lambda each: (-len(each[0]), each[0])):
            # its parts that are not taken yet, and long enough
            is_free = np.concatenate(([False], owner[run.position : run.span.stop] < 0, [False]))
            edges = np.flatnonzero(is_free[1:] != is_free[:-1])
            for start, stop in edges.reshape(-1, 2).tolist():
                if stop - start >= MIN_RUN:
                    part = Run(run.position + start, run.start + start, run.start + stop)
                    owner[part.position : part.span.stop] = number
                    found.append((part, number, key, chunk))
    chunks: list[PromptChunk] = []
    for run, number, key, ids_of_all in sorted(found, key=itemgetter(0)):
        last = chunks[-1] if chunks else None
        if last and (last.index, last.key) == (number, key) and last.runs[-1].stop <= run.start:
            last.runs = (*last.runs, run)  # the same chunk continues
        else:
            token_ids = tuple(ids_of_all.tolist())
            chunks.append(PromptChunk(index=number, key=key, token_ids=token_ids, runs=(run,)))
    return chunks


def _candidates(
    prompt: Ids, owner: NDArray[np.int64], index: ChunkIndex
) -> list[tuple[Run, str, Ids]]:
    """Maximal runs, which may overlap, each with the key and the ids of its chunk."""
    hashes, at = index.windows.pick(prompt)
    is_open = owner[at] < 0
    hashes, at = hashes[is_open], at[is_open]
    places, known = index.find(np.unique(hashes).tolist()) if len(hashes) else ({}, {})
    # (key, position in the prompt minus place in the chunk) -> end of a run
    seen: dict[tuple[str, int], int] = {}
    found: list[tuple[Run, str, Ids]] = []
    compared = 0
    for hashed, position in zip(hashes.tolist(), at.tolist(), strict=True):
        for key, place in places.get(hashed, ()):
            chunk, diagonal = known.get(key), (key, position - place)
            if chunk is None or not 0 <= place < len(chunk):
                continue  # a damaged or forged index
            if seen.get(diagonal, 0) > position:
                continue
            if compared > _MOST_COMPARED * len(prompt):
                return found
            after = n_in_common(prompt[position:], chunk[place:])
            before = n_in_common(prompt[:position][::-1], chunk[:place][::-1])
            compared += after + before + 1
            seen[diagonal] = position + after
            if before + after >= MIN_RUN:
                found.append((Run(position - before, place - before, place + after), key, chunk))
    return found


def n_in_common(one: NDArray[Any], other: NDArray[Any]) -> int:
    """The length of the common beginning. Compares at most about twice as many ids."""
    n, at, size = min(len(one), len(other)), 0, MIN_RUN
    while at < n:
        differs = np.flatnonzero(one[at : min(n, at + size)] != other[at : min(n, at + size)])
        if len(differs):
            return at + int(differs[0])
        at, size = at + size, 2 * size
    return n


@dataclass(frozen=True, kw_only=True)
class ChunkPart:
    """The part of a chunk that a prompt contains.

    runs: in order, in the prompt and in the chunk.
    blocks: the blocks of the whole chunk; None if it has no usable cache.
    """

    runs: tuple[Run, ...]
    blocks: ChunkBlocks | None = None

    @classmethod
    def whole(cls, blocks: ChunkBlocks, position: int) -> ChunkPart:
        """A whole chunk at ``position``."""
        return cls(runs=(Run(position, 0, blocks.n_tokens),), blocks=blocks)

    def within(self, positions: range) -> ChunkPart | None:
        """The part at these positions of the prompt; None if it has no token there."""
        runs = []
        for run in self.runs:
            first = max(run.position, positions.start)
            stop = min(run.span.stop, positions.stop)
            if first < stop:
                shift = run.start - run.position
                runs.append(Run(first, first + shift, stop + shift))
        return replace(self, runs=tuple(runs)) if runs else None


class Layout:
    """Positions of every token of a request, and the blocks of its cached chunks.

    The prompt's tokens of cached chunks, in order, are the *context*; its tokens (Tctx) and blocks
    (Nb) are numbered consecutively. Of a chunk that the prompt contains in part, only blocks with a
    token in the prompt count. All arrays are int64 or bool, and never changed.

    Args:
        token_ids: of the prompt.
        parts: of chunks, in order.
        prefix: the ``n_prefix`` tokens after which the chunks were computed.
        question: its positions; None for all after the last chunk.

    token_ids: (T,) the prompt.
    uncached: (T,) bool, tokens that are always computed, among them the last one, which gives the
        logits.
    context_positions: (Tctx,) position of each context token.
    offset_in_chunk: (Tctx,) index of each context token within its chunk.
    block_of_token, chunk_of_token: (Tctx,) block and chunk of each context token.
    block_lengths, block_chunk: (Nb,) tokens in each block, and the chunk it belongs to.
    block_in_chunk: (Nb,) index of each block within its chunk.
    is_anchor: (Nb,) bool, initial and local blocks.
    exact: (C,) bool, chunks whose entries equal full prefill's, because exactly the prefix precedes
        them in the prompt.
    question: (W,) positions of the question's tokens, the last token at least.
    chunk_lengths: (C,) tokens of each whole chunk.
    token_range, block_range: (C) the context tokens and the blocks of each chunk.
    """

    def __init__(
        self, token_ids: Sequence[int], parts: Sequence[ChunkPart], prefix: tuple[int, ...],
        question: range | None = None,
    ) -> None:  # fmt: skip
        cached = [(part.blocks, part) for part in parts if part.blocks is not None]
        runs = [(chunk, run) for chunk, (_, part) in enumerate(cached) for run in part.runs]
        positions = _joined(np.arange(run.span.start, run.span.stop) for _, run in runs)
        self.n_tokens, self.n_context, self.n_chunks = len(token_ids), len(positions), len(cached)
        self.n_prefix = len(prefix)
        self.token_ids: Numbers = np.array(token_ids, np.int64)
        self.uncached: Mask = np.ones(self.n_tokens, np.bool_)
        self.uncached[positions] = False
        self.uncached[-1:] = True
        self.context_positions = positions
        self.offset_in_chunk = _joined(np.arange(run.start, run.stop) for _, run in runs)
        n_of_chunk = [sum(map(len, part.runs)) for _, part in cached]
        self.token_range = _ranges(n_of_chunk)
        self.chunk_of_token: Numbers = np.repeat(np.arange(self.n_chunks), n_of_chunk)
        self.chunk_lengths: Numbers = np.array([of.n_tokens for of, _ in cached], np.int64)

        # numbered as if the prompt contained all blocks of each chunk, then without missing ones
        n_blocks = [blocks.n_blocks for blocks, _ in cached]
        first_block = np.array([0, *accumulate(n_blocks)], np.int64)
        size = cached[0][0].scheme.size if cached else 1
        whole_number = first_block[self.chunk_of_token] + self.offset_in_chunk // size
        numbers, self.block_of_token, self.block_lengths = np.unique(
            whole_number, return_inverse=True, return_counts=True
        )
        self.n_blocks = len(numbers)
        n_begun = first_block.searchsorted(numbers, side="right")
        self.block_chunk: Numbers = np.asarray(n_begun, np.int64) - 1
        self.block_in_chunk: Numbers = numbers - first_block[self.block_chunk]
        n_blocks_of_chunk = np.bincount(self.block_chunk, minlength=self.n_chunks)
        self.block_range = _ranges(n_blocks_of_chunk.tolist())
        is_anchor = [np.zeros(0, np.bool_), *(blocks.is_anchor for blocks, _ in cached)]
        self.is_anchor: Mask = np.concatenate(is_anchor)[numbers]

        begins = tuple(token_ids[: self.n_prefix]) == prefix
        exact = [
            begins and [(r.start, r.position) for r in part.runs] == [(0, self.n_prefix)]
            for _, part in cached
        ]
        self.exact: Mask = np.array(exact, np.bool_)
        if question is None:
            end = max((part.runs[-1].span.stop for part in parts), default=0)
            question = range(min(end, self.n_tokens - 1), self.n_tokens)
        self.question: Numbers = np.arange(question.start, question.stop)

    @cached_property
    def prefilled_positions(self) -> Numbers:
        """(Tctx,) position of each context token when its cache was computed."""
        after_prefix = self.offset_in_chunk + self.n_prefix
        return np.where(self.exact[self.chunk_of_token], self.context_positions, after_prefix)

    @cached_property
    def middle_of_chunk(self) -> Mask:
        """(C, Nb) bool: the middle blocks of each chunk."""
        chunk = np.arange(self.n_chunks)[:, None]
        is_middle: Mask = (self.block_chunk == chunk) & ~self.is_anchor
        return is_middle


def _joined(parts: Iterable[Numbers]) -> Numbers:
    return np.concatenate([np.empty(0, np.int64), *parts])


def _ranges(lengths: Sequence[int]) -> tuple[range, ...]:
    """Consecutive ranges of these lengths, from 0 on."""
    return tuple(range(end - n, end) for n, end in zip(lengths, accumulate(lengths), strict=True))
