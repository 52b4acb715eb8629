"""What is asked of the model for one prompt, and the first token that comes out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from samkv_integrations.chunks.caching import Chunks
from samkv_integrations.errors import UnsupportedModel
from samkv_integrations.methods import Method
from samkv_integrations.options import AnswerSettings
from samkv_integrations.plan.costs import CostModel
from samkv_integrations.plan.kept_sequences import KeptSequence, KeptSequences, Match, Wanted
from samkv_integrations.prompt.layout import Layout
from samkv_integrations.prompt.resolve import Resolved
from samkv_integrations.report import Report, Stage
from samkv_integrations.runtimes.transformers.eviction import Eviction
from samkv_integrations.runtimes.transformers.model.model import Model
from samkv_integrations.runtimes.transformers.passes.blend import Watch
from samkv_integrations.runtimes.transformers.passes.working_cache import FirstEntries, WorkingCache
from samkv_integrations.runtimes.transformers.sampling import JsonConstraint

AS_TEXT = AnswerSettings.of(on_miss="text")
"""For prompts that are looked at, and computed without keeping anything."""


@dataclass(kw_only=True, eq=False)
class Request:
    """One prompt and how to answer it: read in the caller's thread, computed in the model's.

    chunks: identifies and computes chunk caches. resolved: the prompt's tokens, and the open caches
    of its chunks. capacity: tokens of the answer at most. settings: the options of the answer.
    stable_layers: N*, for methods that need attention statistics.
    eviction: of an answer over caches; whole_eviction: of one whose prompt is computed in full.
    costs: for a method that computes the prompt in full where that is faster, else None.
    prefixes: sequences that earlier answers left; None to use and leave none. watch: sees the pass.

    The rest is for tokens after the first. end_ids: tokens that end the answer. form: the JSON
    schema that it keeps to. announce_s: seconds that announcements took for chunks of the prompt.
    began, asked: when the caller asked, and when the prompt had been read (`time.perf_counter`).
    n_held: first tokens that were in memory when it was last looked up.
    stages: those that have ended, in order; they do not overlap.
    """

    chunks: Chunks
    resolved: Resolved
    method: Method
    capacity: int
    settings: AnswerSettings
    stable_layers: tuple[int, ...] = ()
    eviction: Eviction | None = None
    whole_eviction: Eviction | None = None
    costs: CostModel | None = None
    prefixes: KeptSequences[FirstEntries] | None = None
    watch: Watch | None = None
    end_ids: frozenset[int] = frozenset()
    form: JsonConstraint | None = None
    announce_s: float = 0.0
    began: float = 0.0
    asked: float = 0.0
    n_held: int = 0
    stages: list[Stage] = field(default_factory=list)

    @property
    def model(self) -> Model:
        """The model that computes the answer."""
        return self.chunks.model

    # -- sequences in memory ------------------------------------------------------------------

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

    @property
    def way(self) -> object:
        """The method with its options, and the kind of caches: what blended entries depend on."""
        return self.method, self.chunks.fingerprint.digest

    @property
    def goes_on_in_chunks(self) -> bool:
        """Whether it may take entries of chunks from memory, which it attends to like any others.

        Not where tokens of chunks are selected, weighed or evicted.
        """
        method = self.method
        return self.eviction is None and method.select.keeps_all and method.attend is None

    @property
    def keeps(self) -> bool:
        """Whether later prompts may go on from it."""
        return self.prefixes is not None and self.prefixes.max_bytes > 0

    def beginning(self, *, is_exact: bool = False) -> Match[FirstEntries]:
        """The first tokens that are in memory.

        is_exact: those whose entries equal full prefill's, as a method that uses no cache takes
            them; else those that the method may go on from.
        """
        if self.prefixes is None:
            return Match()
        wanted = Wanted(
            made_by=self.chunks.fingerprint.computed_by, way=self.way,
            deletion=self.resolved.since, token_ids=self.token_ids,
            first_chunk=self.resolved.first_chunk, n_asked=self.n_asked,
            chunk_starts=tuple(
                run.position for chunk in self.resolved.chunks for run in chunk.runs
            ),
        )  # fmt: skip
        if is_exact or not self.method.recompute.uses_caches:
            return self.prefixes.exact(wanted)
        return self.prefixes.go_on(wanted)

    def look_up(self) -> tuple[Match[FirstEntries], int]:
        """What is in memory of the prompt, and how many of its first tokens are taken from there.

        The caches of the chunks behind these are opened, see `Resolved.open`.
        """
        found = self.beginning()
        n_held = found.n_tokens
        if not self.goes_on_in_chunks:
            n_held = min(n_held, self.resolved.first_chunk)
        self.n_held = n_held
        self.resolved.open(behind=n_held)
        return found, n_held

    def keep(self, sequence: KeptSequence[FirstEntries]) -> bool:
        """Keep what was computed, for later prompts; returns whether there was room."""
        return self.prefixes is not None and self.has_same_model and self.prefixes.keep(sequence)

    @property
    def has_same_model(self) -> bool:
        """Whether the model is still what it was when the prompt was read."""
        try:
            return self.model.identity.look() == self.resolved.generation
        except UnsupportedModel:
            return False

    def drop(self, sequence: KeptSequence[FirstEntries]) -> None:
        """Keep the entries of a sequence no longer."""
        if self.prefixes is not None:
            self.prefixes.drop(sequence.entries)

    def free_kept(self) -> None:
        """Free the memory of kept sequences."""
        if self.prefixes is not None:
            self.prefixes.clear()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record the block as a stage.

        On a GPU it ends when its work is launched; the next stage that waits for the device
        includes the rest.
        """
        began = time.perf_counter()
        try:
            yield
        finally:
            self.stages.append(Stage(name=name, began=began, ended=time.perf_counter()))


@dataclass(frozen=True, kw_only=True)
class FirstToken:
    """The result of the prompt's pass.

    logits: (vocabulary,) of the first token. cache: KV entries for the tokens after it. report:
    figures that `RunningAnswer` and `AnswerStream` add, such as ``ttft_s``, are still 0. kept: the
    prompt's entries in memory, which those of the answer may follow; None if they cannot.
    """

    logits: Tensor
    cache: WorkingCache
    layout: Layout
    report: Report
    kept: KeptSequence[FirstEntries] | None = None
