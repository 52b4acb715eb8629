"""Where tokens sit: the positions of a prompt's tokens, and those that chunks have caches of.

Shapes, one legend for the whole package: L layers, H query heads, G key-value heads, D head dim,
T tokens, S kept tokens, B block size, N blocks, C chunks in a request, R computed tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samkv_integrations.cache.chunk import ChunkBlocks
from samkv_integrations.cache.windows import MIN_RUN, ChunkIndex, Ids, Place

_MOST_COMPARED = 64
"""Ids that are compared, for each id of a prompt. Chunks that were made to take long are text."""


@dataclass(frozen=True, order=True)
class Run:
    """Token ids ``[start, stop)`` of a chunk, which a prompt holds from ``position`` on."""

    position: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def span(self) -> range:
        """Positions in the prompt."""
        return range(self.position, self.position + len(self))


@dataclass(frozen=True, kw_only=True)
class Occurrence:
    """One chunk in a prompt: the runs of it that follow each other, in order.

    A chunk has several where a template indents or quotes its lines, and may occur twice.

    index: which of the given indexes knows it. key: its name there. token_ids: of all of it.
    """

    index: int
    key: str
    token_ids: tuple[int, ...]
    runs: tuple[Run, ...]


def find_runs(ids: Sequence[int], indexes: Sequence[ChunkIndex]) -> list[Occurrence]:
    """The chunks in a prompt, in order.

    Every run is as long as it can be and has at least `MIN_RUN` ids. Where two overlap, that of an
    earlier index wins, then the longer one; what is left of the other counts if it is long enough.
    The time grows with the length of the prompt, not with the number of chunks.
    """
    prompt = np.asarray(ids, np.int32)
    owner = np.full(len(prompt), -1)  # of each id: which of `found` has it
    found: list[tuple[Run, int, str, Ids]] = []
    for number, index in enumerate(indexes):
        candidates = _candidates(prompt, owner, index)
        for run, key, chunk in sorted(candidates, key=lambda each: (-len(each[0]), each[0])):
            for part in _free(run, owner):
                owner[part.position : part.span.stop] = number
                found.append((part, number, key, chunk))
    occurrences: list[Occurrence] = []
    for run, number, key, chunk in sorted(found, key=lambda each: each[0]):
        last = occurrences[-1] if occurrences else None
        if last and (last.index, last.key) == (number, key) and last.runs[-1].stop <= run.start:
            occurrences[-1] = replace(last, runs=(*last.runs, run))  # it goes on in the chunk
        else:
            ids_of_all = tuple(chunk.tolist())
            occurrences.append(Occurrence(index=number, key=key, token_ids=ids_of_all, runs=(run,)))
    return occurrences


def _candidates(
    prompt: Ids, owner: NDArray[np.int64], index: ChunkIndex
) -> list[tuple[Run, str, Ids]]:
    """Runs that are as long as they can be, whatever is taken already, of which chunk."""
    hashes, at = index.windows.pick(prompt)
    is_open = owner[at] < 0 if len(at) else np.empty(0, bool)
    hashes, at = hashes[is_open], at[is_open]
    places, known = index.find(np.unique(hashes).tolist()) if len(hashes) else ({}, {})
    # (key, how far the prompt is ahead of the chunk) -> where a run ends
    seen: dict[tuple[str, int], int] = {}
    found, compared = [], 0
    for position, (key, place) in _anchors(hashes, at, places):
        chunk, diagonal = known.get(key), (key, position - place)
        if chunk is None or seen.get(diagonal, 0) > position:
            continue
        if compared > _MOST_COMPARED * len(prompt):
            break
        after = _in_common(prompt[position:], chunk[place:])
        before = _in_common(prompt[:position][::-1], chunk[:place][::-1])
        compared += after + before + 1
        seen[diagonal] = position + after
        if before + after >= MIN_RUN:
            found.append((Run(position - before, place - before, place + after), key, chunk))
    return found


def _anchors(
    hashes: NDArray[np.int64], at: NDArray[np.int64], places: Mapping[int, Sequence[Place]]
) -> Iterator[tuple[int, Place]]:
    for hashed, position in zip(hashes.tolist(), at.tolist(), strict=True):
        for place in places.get(hashed, ()):
            yield position, place


def _in_common(one: Ids, other: Ids) -> int:
    """How many ids both begin with; looks no further than twice that."""
    n, at, size = min(len(one), len(other)), 0, MIN_RUN
    while at < n:
        differs = np.flatnonzero(one[at : min(n, at + size)] != other[at : min(n, at + size)])
        if len(differs):
            return at + int(differs[0])
        at, size = at + size, 2 * size
    return n


def _free(run: Run, owner: NDArray[np.int64]) -> Iterator[Run]:
    """The parts of a run that nothing has taken and that are long enough."""
    is_free = np.concatenate(([False], owner[run.position : run.span.stop] < 0, [False]))
    edges = np.flatnonzero(is_free[1:] != is_free[:-1])
    for first, last in edges.reshape(-1, 2).tolist():
        if last - first >= MIN_RUN:
            yield Run(run.position + first, run.start + first, run.start + last)


@dataclass(frozen=True, kw_only=True)
class ChunkPart:
    """What a prompt holds of one chunk.

    runs: in order, in the prompt and in the chunk.
    blocks: the block structure of the whole chunk; None if its cache is not at hand.
    """

    runs: tuple[Run, ...]
    blocks: ChunkBlocks | None = None

    @classmethod
    def whole(cls, blocks: ChunkBlocks, position: int) -> ChunkPart:
        """All of a chunk, from ``position`` on."""
        return cls(runs=(Run(position, 0, blocks.n_tokens),), blocks=blocks)

    @property
    def is_whole(self) -> bool:
        """Whether the prompt holds all of the chunk in one run."""
        assert self.blocks is not None
        return len(self.runs) == 1 and len(self.runs[0]) == self.blocks.n_tokens


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Positions of every token of a request, and the blocks of its cached chunks.

    The tokens that the prompt holds of cached chunks, in prompt order, form the *context*: its
    tokens (Tctx of them) and blocks (Nb) are numbered through. Of a chunk that the prompt holds in
    part there are the blocks that the prompt holds a token of. All tensors live on the CPU.

    token_ids: (T,) the prompt.
    uncached: (T,) bool, tokens that are always computed. The last token always is: it gives the
        logits.
    context_positions: (Tctx,) position of each context token.
    offset_in_chunk: (Tctx,) index of each context token within its chunk.
    block_of_token: (Tctx,) block of each context token.
    block_lengths, block_chunk: (Nb,) tokens in each block, and the chunk it belongs to.
    block_in_chunk: (Nb,) which block of its chunk it is.
    is_anchor: (Nb,) bool, initial and local blocks.
    exact: (C,) bool, chunks of which one run begins right after the prefix that they were prefilled
        with, so that its entries already equal full prefill's.
    question: (W,) positions of the tokens after the last chunk; the last token alone if there are
        none.
    parts: (C) what the prompt holds of each cached chunk.
    n_missed: tokens of chunks that had no usable cache.
    n_prefix: tokens that chunks were prefilled after.
    """

    token_ids: Tensor
    uncached: Tensor
    context_positions: Tensor
    offset_in_chunk: Tensor
    block_of_token: Tensor
    block_lengths: Tensor
    block_chunk: Tensor
    block_in_chunk: Tensor
    is_anchor: Tensor
    exact: Tensor
    question: Tensor
    parts: tuple[ChunkPart, ...]
    n_missed: int
    n_prefix: int

    @classmethod
    def of(
        cls, token_ids: Sequence[int], parts: Sequence[ChunkPart], prefix: tuple[int, ...]
    ) -> Layout:
        """The layout of a prompt that holds ``parts``, in order.

        prefix: what chunks were prefilled after.
        """
        ids = torch.tensor(token_ids, dtype=torch.long)
        cached = tuple(part for part in parts if part.blocks is not None)
        empty = torch.empty(0, dtype=torch.long)
        positions, offsets, blocks, anchors = [empty], [empty], [empty], [empty.bool()]
        for part in cached:
            assert part.blocks is not None
            held = torch.cat([torch.arange(run.start, run.stop) for run in part.runs])
            positions += [torch.arange(run.span.start, run.span.stop) for run in part.runs]
            offsets.append(held)
            blocks.append(held // part.blocks.scheme.size)
            anchors.append(part.blocks.is_anchor[torch.unique(blocks[-1])])
        chunk_of_token = torch.repeat_interleave(
            torch.tensor([len(each) for each in offsets[1:]], dtype=torch.long)
        )
        of_token = torch.stack((chunk_of_token, torch.cat(blocks)))
        of_block, block_of_token, lengths = torch.unique(
            of_token, return_inverse=True, return_counts=True, dim=1
        )
        block_chunk, block_in_chunk = of_block
        context_positions = torch.cat(positions)
        uncached = torch.ones(len(ids), dtype=torch.bool)
        uncached[context_positions] = False
        uncached[-1:] = True
        ends = [run.span.stop for part in parts for run in part.runs]
        question = torch.arange(min(max(ends, default=0), len(ids) - 1), len(ids))
        begins = tuple(token_ids[: len(prefix)]) == prefix
        return cls(
            token_ids=ids,
            uncached=uncached,
            context_positions=context_positions,
            offset_in_chunk=torch.cat(offsets),
            block_of_token=block_of_token,
            block_lengths=lengths,
            block_chunk=block_chunk,
            block_in_chunk=block_in_chunk,
            is_anchor=torch.cat(anchors),
            exact=torch.tensor(
                [
                    begins and len(part.runs) == 1
                    and (part.runs[0].start, part.runs[0].position) == (0, len(prefix))
                    for part in cached
                ],
                dtype=torch.bool,
            ),
            question=question,
            parts=cached,
            n_missed=sum(len(run) for part in parts if part.blocks is None for run in part.runs),
            n_prefix=len(prefix),
        )  # fmt: skip

    def as_text(self) -> Layout:
        """The same prompt without any chunk."""
        return Layout.of(self.token_ids.tolist(), (), ())

    @property
    def n_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def n_context(self) -> int:
        """Context tokens with a cache (Tctx)."""
        return int(self.context_positions.shape[0])

    @property
    def n_blocks(self) -> int:
        return int(self.block_lengths.shape[0])

    @property
    def n_chunks(self) -> int:
        return len(self.parts)

    @cached_property
    def chunk_of_token(self) -> Tensor:
        """(Tctx,) chunk of each context token."""
        return self.block_chunk[self.block_of_token]

    @cached_property
    def chunk_lengths(self) -> Tensor:
        """(C,) tokens of each chunk, whether or not the prompt holds all of them."""
        return torch.tensor([part.blocks.n_tokens for part in self.parts if part.blocks])

    def place_in_chunks(self, device: torch.device) -> Tensor:
        """(Tctx,) place of each context token in a table of chunks by offsets, row after row.

        The table is as wide as the longest chunk. Moved to ``device`` once, as each move waits.
        """
        if device not in self._moved:
            place = self.chunk_of_token * self.longest_chunk + self.offset_in_chunk
            self._moved[device] = place.to(device)
        return self._moved[device]

    @cached_property
    def longest_chunk(self) -> int:
        """Tokens of it."""
        return int(self.chunk_lengths.max())

    @cached_property
    def _moved(self) -> dict[torch.device, Tensor]:
        return {}

    @cached_property
    def prefilled_positions(self) -> Tensor:
        """(Tctx,) position at which each context token was prefilled."""
        return self.offset_in_chunk + self.n_prefix

    @cached_property
    def middle_of_chunk(self) -> Tensor:
        """(C, Nb) bool: the middle blocks of each chunk."""
        chunk = torch.arange(self.n_chunks)[:, None]
        return (self.block_chunk == chunk) & ~self.is_anchor

    @cached_property
    def block_range(self) -> list[range]:
        """(C) the blocks of each chunk."""
        counts = torch.bincount(self.block_chunk, minlength=self.n_chunks)
        ends = counts.cumsum(0).tolist()
        return [range(end - n, end) for n, end in zip(counts.tolist(), ends, strict=True)]
