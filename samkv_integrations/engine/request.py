"""What is asked of the model for one prompt, and the first token that comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from samkv_integrations.engine.answer_settings import AnswerSettings
from samkv_integrations.engine.blend import Watch
from samkv_integrations.engine.chunks import Chunks
from samkv_integrations.engine.costs import CostModel
from samkv_integrations.engine.prefix_cache import PrefixCache
from samkv_integrations.engine.report import Report, Stage
from samkv_integrations.engine.working_cache import WorkingCache
from samkv_integrations.eviction import Eviction
from samkv_integrations.methods import Method
from samkv_integrations.model.model import Model
from samkv_integrations.model.sampling import JsonConstraint
from samkv_integrations.prompt.layout import Layout
from samkv_integrations.prompt.resolve import Resolved


@dataclass(kw_only=True, eq=False)
class Request:
    """One prompt and how to answer it: read in the caller's thread, computed in the model's.

    chunks: identifies and computes chunk caches. resolved: the prompt's tokens, and the open caches
    of its chunks. capacity: tokens of the answer at most. settings: the options of the answer.
    stable_layers: N*, for methods that need attention statistics.
    eviction: of an answer over caches; whole_eviction: of one whose prompt is computed in full.
    costs: for a method that computes the prompt in full where that is faster, else None.
    prefixes: entries of earlier prompts; None to use and leave none. watch: sees the pass.

    The rest is for tokens after the first. end_ids: tokens that end the answer. form: the JSON
    schema that it keeps to. announce_s: seconds that announcements took for chunks of the prompt.
    began, asked: when the caller asked, and when the prompt had been read (`time.perf_counter`).
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
    prefixes: PrefixCache | None = None
    watch: Watch | None = None
    end_ids: frozenset[int] = frozenset()
    form: JsonConstraint | None = None
    announce_s: float = 0.0
    began: float = 0.0
    asked: float = 0.0

    @property
    def model(self) -> Model:
        """The model that computes the answer."""
        return self.chunks.model


@dataclass(frozen=True, kw_only=True)
class FirstToken:
    """The result of the prompt's pass.

    logits: (vocabulary,) of the first token. cache: KV entries for the tokens after it. report:
    ``ttft_s`` and the figures of decoding are still 0. stages: in order.
    """

    logits: Tensor
    cache: WorkingCache
    layout: Layout
    report: Report
    stages: Sequence[Stage]
