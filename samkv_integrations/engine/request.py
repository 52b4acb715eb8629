"""One prompt and how to answer it, and what its answer begins with."""

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


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how to answer it: made in the caller's thread, computed in the model's.

    chunks: what makes and identifies chunk caches. resolved: the prompt's tokens, and the open
    caches of its chunks. stable_layers: N*, for methods that need statistics. capacity: most tokens
    of the answer. settings: the options that it was asked with.
    own_eviction: take the method's eviction in place of ``eviction``. costs: for a method that
    computes everything where that is faster, else None. prefixes: beginnings of earlier prompts,
    None for none. watch: sees the pass.

    What follows is for answers beyond the first token. end_ids: tokens that end the answer. form:
    the JSON schema that it keeps to. announce_s: seconds that announcements took for chunks of the
    prompt. began, asked: when the caller asked, and when the prompt had been read, times of
    `time.perf_counter`.
    """

    model: Model
    chunks: Chunks
    resolved: Resolved
    method: Method
    capacity: int
    settings: AnswerSettings
    stable_layers: tuple[int, ...] = ()
    eviction: Eviction | None = None
    own_eviction: bool = False
    costs: CostModel | None = None
    prefixes: PrefixCache | None = None
    watch: Watch | None = None
    end_ids: frozenset[int] = frozenset()
    form: JsonConstraint | None = None
    announce_s: float = 0.0
    began: float = 0.0
    asked: float = 0.0


@dataclass(frozen=True, kw_only=True)
class FirstToken:
    """What an answer begins with.

    logits: (vocabulary,) of its first token. cache: what its later tokens go on with. report: the
    figures so far, ``ttft_s`` and those of decoding left at 0. stages: in order.
    """

    logits: Tensor
    cache: WorkingCache
    layout: Layout
    report: Report
    stages: Sequence[Stage]
