"""A request: one prompt, and how to answer it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from samkv_integrations.chunks.caching import Chunks
from samkv_integrations.errors import UnsupportedModel
from samkv_integrations.methods import Method
from samkv_integrations.methods.costs import CostModel
from samkv_integrations.methods.eviction import Eviction
from samkv_integrations.options import AnswerSettings
from samkv_integrations.plan.kept_sequences import KeptSequence, KeptSequences, Match, Wanted
from samkv_integrations.prompt.resolve import Resolved
from samkv_integrations.report import Stage
from samkv_integrations.runtimes.base import FirstEntries, Runtime, TokenMask


@dataclass(kw_only=True)
class Times:
    """Times of a request, by `time.perf_counter`.

    began, read: when the caller asked, and when the prompt had been read. announce_s: seconds that
    announcements took for chunks of the prompt.
    """

    began: float
    read: float = 0.0
    announce_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class HowToAnswer:
    """The options of an answer, with the engine's own where none was given.

    method: as asked for. eviction: of an answer over caches; whole_eviction: of one whose prompt is
    computed in full. costs: for a method that computes the prompt in full where that is faster,
    else None. settings: the other options.
    capacity: tokens of the answer at most. end_ids: tokens that end it. mask: of the JSON schema
    that it keeps to.
    """

    method: Method
    eviction: Eviction | None
    whole_eviction: Eviction | None
    costs: CostModel | None
    settings: AnswerSettings
    capacity: int
    end_ids: frozenset[int]
    mask: TokenMask | None


@dataclass(kw_only=True, eq=False)
class Request:
    """One prompt and how to answer it: read in the caller's thread, computed in the model's.

    chunks: identifies and computes chunk caches. resolved: the prompt's tokens, and the open caches
    of its chunks. sequences: kept sequences of the engine. owner: who asks, see `FairTurns`.
    n_held: length of the cached prefix at the latest look-up.
    stages: those that have ended, in order; they do not overlap.
    """

    chunks: Chunks
    resolved: Resolved
    how: HowToAnswer
    times: Times
    sequences: KeptSequences[FirstEntries]
    owner: str = ""
    n_held: int = 0
    stages: list[Stage] = field(default_factory=list)

    @property
    def model(self) -> Runtime:
        """What runs the model."""
        return self.chunks.model

    @cached_property
    def token_ids(self) -> NDArray[np.int64]:
        """(T,) of the prompt."""
        return np.array(self.resolved.token_ids, np.int64)

    @cached_property
    def n_asked(self) -> int:
        """Tokens of the prompt without those that its template writes for an answer to begin."""
        ids, opening = self.resolved.token_ids, self.model.answer_opening
        n_before = max(0, len(ids) - len(opening))
        return n_before if tuple(ids[n_before:]) == opening else len(ids)

    # -- sequences in memory ------------------------------------------------------------------

    @property
    def way(self) -> object:
        """The method with its options, and the kind of caches: what blended entries depend on."""
        return self.how.method, self.chunks.fingerprint.digest

    @property
    def goes_on_in_chunks(self) -> bool:
        """Whether its cached prefix may contain chunks.

        Not if the method selects blocks or has an attention of its own, or entries are evicted.
        """
        method = self.how.method
        return self.how.eviction is None and method.select.keeps_all and method.attend is None

    @property
    def keeps(self) -> bool:
        """Whether later prompts may go on from it."""
        return self.sequences.max_bytes > 0

    def beginning(self, *, is_exact: bool = False) -> Match[FirstEntries]:
        """The longest beginning of the prompt in memory.

        is_exact: only entries that equal full prefill's, as for a method that uses no cache; else
            all that the method may go on from.
        """
        wanted = Wanted(
            made_by=self.chunks.fingerprint.computed_by, way=self.way,
            deletion=self.resolved.since, token_ids=self.token_ids,
            first_chunk=self.resolved.first_chunk, n_asked=self.n_asked,
            chunk_starts=tuple(
                run.position for chunk in self.resolved.chunks for run in chunk.runs
            ),
        )  # fmt: skip
        if is_exact or not self.how.method.recompute.uses_caches:
            return self.sequences.exact(wanted)
        return self.sequences.go_on(wanted)

    def look_up(self) -> Match[FirstEntries]:
        """The beginning of the prompt in memory; sets `n_held`, the length of the cached prefix.

        The caches of the chunks after it are opened, see `Resolved.open`.
        """
        found = self.beginning()
        self.n_held = found.n_tokens
        if not self.goes_on_in_chunks:
            self.n_held = min(self.n_held, self.resolved.first_chunk)
        self.resolved.open(behind=self.n_held)
        return found

    def keep(self, sequence: KeptSequence[FirstEntries]) -> bool:
        """Keep a sequence for later prompts; returns whether it is kept."""
        return self._has_same_model and self.sequences.keep(sequence)

    @property
    def _has_same_model(self) -> bool:
        """Whether the model is still what it was when the prompt was read."""
        try:
            return self.model.generation() == self.resolved.generation
        except UnsupportedModel:
            return False

    def drop(self, sequence: KeptSequence[FirstEntries]) -> None:
        """Drop a kept sequence."""
        self.sequences.drop(sequence.entries)

    def free_memory(self) -> None:
        """Free the hot chunks of all engines of the model, and kept sequences."""
        self.model.free()
        self.sequences.clear()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record the block as a stage.

        On a GPU the stage ends when its work is launched; the rest counts in the next stage that
        waits for the device.
        """
        began = time.perf_counter()
        try:
            yield
        finally:
            self.stages.append(Stage(name=name, began=began, ended=time.perf_counter()))
