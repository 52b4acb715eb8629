"""Kept sequences: what answers have computed stays in memory, for prompts that go on from it.

The KV entries of a prompt and its answer are found by their token ids. A follow-up, which contains
the whole earlier prompt, goes on from all of them. Any other prompt that begins alike takes only
entries that do not depend on an earlier question: those before the first chunk.

Kept sequences are never written to disk. Each engine has its own, so no namespace sees another's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from samkv_integrations.prompt.layout import n_in_common

Ids = NDArray[np.int64]
Entries = TypeVar("Entries")

LEAST = 8
"""Fewer tokens are neither kept nor taken: computing them is faster than finding them."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptSequence(Generic[Entries]):
    """The KV entries of a prompt's first tokens, often of all of them and of the answer.

    made_by: the model that computed them, see `Fingerprint.computed_by`.
    way: the method with its options, and the kind of chunk caches it read.
    deletion: `Chunks.deletions` before the prompt was read.
    token_ids: (P,).
    n_exact: first tokens whose entries equal full prefill's.
    from_cache: (P,) bool, tokens whose entries came from a chunk cache.
    prompts: for each prompt of the conversation, the positions from its first new chunk to the end
        of its question. Entries there depend on that question.
    entries: of the runtime. n_bytes: their size.
    turns: for each prompt, the position where its own tokens begin, after the previous answer.
    """

    made_by: str
    way: object
    deletion: int
    token_ids: Ids
    n_exact: int
    from_cache: NDArray[np.bool_]
    prompts: tuple[range, ...]
    entries: Entries
    n_bytes: int
    turns: tuple[int, ...] = ()

    def covers(self, other: KeptSequence[Entries]) -> bool:
        """Whether it serves every prompt that ``other`` serves, but for its last few tokens."""
        if self.made_by != other.made_by:
            return False
        n_common = n_in_common(self.token_ids, other.token_ids)
        n_most = len(other.token_ids) - LEAST
        return (
            n_common >= n_most
            and self.n_exact >= min(other.n_exact, n_common)
            and all(each.stop <= n_common for each in other.prompts)  # not just as long
            and self.prompts[: len(other.prompts)] == other.prompts
            # entries that a later question changed, recomputed ones included, come after `other`
            and all(each.start >= n_most for each in self.prompts[len(other.prompts) :])
            and (self.way == other.way or other.n_exact >= n_most)
        )

    def n_prompts_in(self, n_tokens: int) -> int:
        """How many of its prompts end within the first ``n_tokens``."""
        return sum(prompt.stop <= n_tokens for prompt in self.prompts)

    def n_asked_in(self, n_tokens: int) -> int:
        """Tokens up to the end of the last of these prompts; 0 without one."""
        n_prompts = self.n_prompts_in(n_tokens)
        return self.prompts[n_prompts - 1].stop if n_prompts else 0

    def turn_in(self, n_tokens: int, n_asked: int) -> int:
        """The position where a new prompt's own tokens begin.

        The prompt takes the first ``n_tokens`` of this sequence, and its question ends at
        ``n_asked``. The question may begin like that of another branch, or equal it. Returns 0 if
        the prompt contains no earlier one.
        """
        n_earlier = sum(of.stop <= n_tokens and of.stop < n_asked for of in self.prompts)
        return min((n_tokens, *self.turns[n_earlier:][:1])) if n_earlier else 0


@dataclass(frozen=True, kw_only=True)
class Match(Generic[Entries]):
    """The first ``n_tokens`` of a prompt, as a kept sequence has them.

    is_follow_up: whether the prompt contains a whole earlier prompt of the sequence.
    """

    sequence: KeptSequence[Entries] | None = None
    n_tokens: int = 0
    is_follow_up: bool = False


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a prompt may go on from.

    token_ids: (T,) of the prompt. first_chunk: position of its first chunk, T without one.
    chunk_starts: positions of the runs of all its chunks, in order. n_asked: tokens up to the end
    of the question, without a template's opening of the answer.
    made_by, way, deletion: see `KeptSequence`.
    """

    made_by: str
    way: object
    deletion: int
    token_ids: Ids
    first_chunk: int
    n_asked: int
    chunk_starts: tuple[int, ...] = ()


class KeptSequences(Generic[Entries]):
    """The latest sequences; the least recently used are dropped first. Thread-safe.

    max_bytes: of all together; 0 to keep none. most_within: the longest beginning of entries, of at
    most so many tokens, that a prompt can go on from; by default any.
    """

    def __init__(
        self, max_bytes: int, most_within: Callable[[Entries, int], int] = lambda _, n: n
    ) -> None:
        self.max_bytes, self._most_within = max_bytes, most_within
        self._sequences: list[KeptSequence[Entries]] = []  # the most recently used one last
        self._lock = threading.Lock()
        self._has_warned = False

    @property
    def n_bytes(self) -> int:
        """Of all sequences."""
        with self._lock:
            return self._n_bytes()

    def _n_bytes(self) -> int:
        return sum(each.n_bytes for each in self._sequences)

    def go_on(self, wanted: Wanted) -> Match[Entries]:
        """The longest beginning of a prompt that its method may go on from.

        A follow-up takes what its own method made, up to the first token that differs, else exact
        entries of other methods. Any other prompt takes the tokens before its first chunk and
        before the sequence's, so that no answer depends on what others have asked.
        """
        return self._longest(wanted, _to_go_on_from, prefers_own=True)

    def exact(self, wanted: Wanted) -> Match[Entries]:
        """The longest beginning of a prompt whose entries equal full prefill's."""
        return self._longest(wanted, _exact, prefers_own=False)

    def _longest(
        self, wanted: Wanted, usable: Callable[[KeptSequence[Entries], Wanted], tuple[int, bool]],
        *, prefers_own: bool,
    ) -> Match[Entries]:  # fmt: skip
        best, best_rank = Match[Entries](), (False, False, LEAST)
        with self._lock:
            for each in self._sequences:
                if (each.made_by, each.deletion) != (wanted.made_by, wanted.deletion):
                    continue
                n_tokens, is_follow_up = usable(each, wanted)
                n_tokens = min(n_tokens, len(wanted.token_ids) - 1)  # the last gives the logits
                if (n_most := self._most_within(each.entries, n_tokens)) < n_tokens:
                    n_tokens, is_follow_up = n_most, each.n_prompts_in(n_most) > 0
                # a conversation's own sequence wins, even if that of another one shares more
                is_own = is_follow_up and each.way == wanted.way
                rank = (is_own, is_follow_up, n_tokens) if prefers_own else (False, False, n_tokens)
                if n_tokens >= LEAST and rank >= best_rank:
                    best_rank = rank
                    best = Match(sequence=each, n_tokens=n_tokens, is_follow_up=is_follow_up)
            if best.sequence is not None:
                self._sequences.remove(best.sequence)
                self._sequences.append(best.sequence)
        return best

    def keep(self, new: KeptSequence[Entries]) -> bool:
        """Keep a sequence, in place of those that it covers; returns whether it is kept.

        If it began before a deletion, no prompt finds it, and the next `follow` drops it.
        """
        if not self.max_bytes or len(new.token_ids) < LEAST or new.deletion < 0:
            return False
        with self._lock:
            if new.n_bytes > self.max_bytes:
                self._drop(new.entries)  # its prompt, whose tensors have grown with the answer
                if not self._has_warned:
                    self._has_warned = True
                    _log.warning(
                        "a prompt and its answer of %d tokens take %d bytes, more than "
                        "prefix_bytes=%d, so they are not kept, and the next turn computes them "
                        "again; raise prefix_bytes. This is said once",
                        len(new.token_ids), new.n_bytes, self.max_bytes,
                    )  # fmt: skip
                return False
            self._sequences = [each for each in self._sequences if not new.covers(each)]
            self._sequences.append(new)
            while self._n_bytes() > self.max_bytes:
                self._sequences.pop(0)
        return True

    def drop(self, entries: Entries) -> None:
        """Drop the sequences with these entries."""
        with self._lock:
            self._drop(entries)

    def _drop(self, entries: Entries) -> None:
        self._sequences = [each for each in self._sequences if each.entries is not entries]

    def follow(self, deletion: int) -> None:
        """Drop sequences older than a deletion. deletion: `Chunks.deletions` now, -1 if unknown."""
        with self._lock:
            if deletion >= 0:
                self._sequences = [each for each in self._sequences if each.deletion == deletion]

    def clear(self) -> None:
        """Drop all sequences, for example after a deletion or a change of the model."""
        with self._lock:
            self._sequences.clear()


def _to_go_on_from(sequence: KeptSequence[Entries], wanted: Wanted) -> tuple[int, bool]:
    """First tokens that a prompt may take, and whether it is a follow-up."""
    n_common = n_in_common(sequence.token_ids, wanted.token_ids)
    n_contained = n_common
    if sequence.way != wanted.way:
        # The same prompt with another method is not a follow-up: that is how methods are
        # compared.
        n_common = min(n_common, sequence.n_exact)
        n_contained = min(n_common, wanted.n_asked - 1)
    prompts, n_prompts = sequence.prompts, sequence.n_prompts_in(n_contained)
    if n_prompts < len(prompts):  # no entries that were blended for another prompt
        n_common = min(n_common, prompts[n_prompts].start)
        if n_prompts:  # nor entries of text that is a chunk in this prompt
            n_before = max((prompts[n_prompts - 1].stop, *sequence.turns[n_prompts:][:1]))
            own = (start for start in wanted.chunk_starts if start >= n_before)
            n_common = min(n_common, next(own, n_common))
    if not n_prompts:
        n_common = min(n_common, wanted.first_chunk, sequence.n_exact)
    return n_common, n_prompts > 0


def _exact(sequence: KeptSequence[Entries], wanted: Wanted) -> tuple[int, bool]:
    n_common = min(n_in_common(sequence.token_ids, wanted.token_ids), sequence.n_exact)
    return n_common, sequence.n_prompts_in(n_common) > 0
