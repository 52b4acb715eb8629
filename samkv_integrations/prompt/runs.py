"""Runs of token ids that a prompt and chunks have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

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
    places = index.places(np.unique(hashes).tolist()) if len(hashes) else {}
    known = index.token_ids({key for of_one in places.values() for key, _ in of_one})
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
