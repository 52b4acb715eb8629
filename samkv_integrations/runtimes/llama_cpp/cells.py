"""The cells of a context, and the sequences that share them.

A kept sequence stays in its cells until a running answer needs them. The least recently used one
goes first. A running answer has reserved the cells for all its tokens, so that none is missing in
the middle of an answer.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samkv_integrations.errors import OutOfMemory
from samkv_integrations.runtimes.llama_cpp.library.context import LlamaContext


@dataclass(eq=False)
class Entries:
    """The KV entries of a sequence, a `FirstEntries`.

    id: of the sequence. token_bytes: bytes of one token's entries. can_crop: whether a part of the
    sequence can be used. cells: of its tokens in order, as `Cells` counts them. n_users: passes and
    running answers that need it. is_lost: whether its cells were given to others. last_used: a
    number that grows with every use. release: frees it, once nobody refers to it.
    """

    id: int
    token_bytes: int
    can_crop: bool = True
    cells: list[int] = field(default_factory=list)
    n_users: int = 1
    is_lost: bool = False
    last_used: int = 0
    release: Any = None

    @property
    def n_tokens(self) -> int:
        return len(self.cells)

    @property
    def n_bytes(self) -> int:
        return 0 if self.is_lost else self.n_tokens * self.token_bytes

    def most_within(self, n_tokens: int) -> int:
        if self.is_lost or (n_tokens < self.n_tokens and not self.can_crop):
            return 0
        return min(n_tokens, self.n_tokens)


class Cells:
    """Counts the cells of a context, and gives its sequences numbers.

    All methods are called with the context's lock. Entries that nobody refers to any more are
    removed at the next call.
    """

    def __init__(self, context: LlamaContext, token_bytes: int, *, can_crop: bool) -> None:
        self._context, self._token_bytes, self._can_crop = context, token_bytes, can_crop
        self.lock = context.lock
        self._n_users = np.zeros(context.n_cells, np.int32)  # sequences of each cell
        self._free = list(range(context.n_cells))
        self._free_ids = list(range(context.most_sequences))
        self._reserved = 0
        self._alive = weakref.WeakSet[Entries]()
        self._unused = deque[tuple[int, list[int]]]()  # of entries that were collected
        self._clock = itertools.count(1)

    @property
    def n_free(self) -> int:
        """Cells that are neither used nor reserved."""
        return len(self._free) - self._reserved

    def new(self) -> Entries:
        """An empty sequence, with its caller as user. Raises OutOfMemory if all are in use."""
        self._make_room(0, n_sequences=1)
        entries = Entries(self._free_ids.pop(), self._token_bytes, self._can_crop)
        entries.last_used = next(self._clock)
        self._alive.add(entries)
        # any thread may drop the last reference
        entries.release = weakref.finalize(
            entries, self._unused.append, (entries.id, entries.cells)
        )
        entries.release.atexit = False
        return entries

    @contextmanager
    def used(self, entries: Entries | None) -> Iterator[None]:
        """A block in which a kept sequence is not dropped."""
        if entries is None:
            yield
            return
        entries.n_users += 1
        entries.last_used = next(self._clock)
        try:
            yield
        finally:
            entries.n_users -= 1

    def reserve(self, n_cells: int) -> Reservation:
        """Make room for ``n_cells`` more tokens.

        Raises OutOfMemory if running answers leave less.
        """
        self._make_room(n_cells)
        self._reserved += n_cells
        return Reservation(self, n_cells)

    def take(self, entries: Entries, n_tokens: int) -> None:
        """Count reserved cells as those of the next tokens of a sequence."""
        taken = [self._free.pop() for _ in range(n_tokens)]
        self._n_users[taken] = 1
        self._reserved -= n_tokens
        entries.cells += taken

    def give_back(self, n_cells: int) -> None:
        """Reserve ``n_cells`` less."""
        self._reserved -= n_cells

    def share(self, source: Entries, target: Entries, start: int, stop: int) -> None:
        """Let ``target`` go on with the tokens of ``source`` at positions [start, stop)."""
        self._context.copy(source.id, target.id, start, stop)
        self._share(source.cells[start:stop], target)

    def share_staged(
        self, staged: Entries, positions: NDArray[np.int64], target: Entries, start: int, stop: int
    ) -> None:
        """As `share`; the tokens of ``staged`` are at ``positions``, ascending."""
        self._context.copy(staged.id, target.id, start, stop)
        first, end = np.searchsorted(positions, (start, stop)).tolist()
        self._share(staged.cells[first:end], target)

    def _share(self, cells: Sequence[int], target: Entries) -> None:
        self._n_users[cells] += 1
        target.cells += cells

    def replace(self, source: Entries, target: Entries, start: int, stop: int) -> None:
        """Let ``target`` share the tokens of ``source`` in place of its own at [start, stop)."""
        self._context.remove(target.id, start, stop)
        self._context.copy(source.id, target.id, start, stop)
        self._n_users[source.cells[start:stop]] += 1
        own, target.cells[start:stop] = target.cells[start:stop], source.cells[start:stop]
        self._release(own)

    def cut(self, entries: Entries, n_tokens: int) -> None:
        """Remove all tokens after the first ``n_tokens``."""
        self._context.remove(entries.id, n_tokens)
        self._release(entries.cells[n_tokens:])
        del entries.cells[n_tokens:]

    def drop(self, entries: Entries) -> None:
        """Free a sequence."""
        if not entries.is_lost:
            entries.is_lost = True
            entries.release.detach()
            self._remove(entries.id, entries.cells)

    def _remove(self, number: int, cells: list[int]) -> None:
        self._context.remove(number)
        self._release(cells)
        cells.clear()
        self._free_ids.append(number)

    def _release(self, cells: Sequence[int]) -> None:
        self._n_users[cells] -= 1
        self._free += [cell for cell in cells if not self._n_users[cell]]

    def _make_room(self, n_cells: int, n_sequences: int = 0) -> None:
        while self._unused:
            self._remove(*self._unused.popleft())
        while self.n_free < n_cells or len(self._free_ids) < n_sequences:
            idle = [each for each in self._alive if not (each.n_users or each.is_lost)]
            if not idle:
                raise OutOfMemory(
                    f"{n_cells} cells of llama.cpp are needed, and running answers leave "
                    f"{self.n_free} of {self._context.n_cells}; give a larger n_ctx, retrieve "
                    "fewer chunks, or ask for fewer answers and tokens at a time"
                    if n_cells
                    else f"all {self._context.most_sequences} sequences of llama.cpp are in use; "
                    "decode fewer answers at a time (max_batch), and read or close open streams"
                )
            self.drop(min(idle, key=lambda each: each.last_used))


@dataclass(eq=False)
class Reservation:
    """Cells that are reserved for tokens to come. left: how many."""

    cells: Cells
    left: int

    def take(self, entries: Entries, n_tokens: int) -> None:
        """Use some for the next tokens of a sequence; more are reserved where they do not do."""
        if n_tokens > self.left:
            self.left += self.cells.reserve(n_tokens - self.left).left
        self.cells.take(entries, n_tokens)
        self.left -= n_tokens

    def add(self, n_cells: int) -> None:
        """Reserve cells that have just become free."""
        self.left += self.cells.reserve(n_cells).left

    def close(self) -> None:
        """Give the rest back."""
        self.cells.give_back(self.left)
        self.left = 0
