"""One prompt and how to answer it, and what its answer begins with."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from samkv_integrations.cache.chunk import Fingerprint
from samkv_integrations.engine.chunks import Chunks
from samkv_integrations.engine.costs import CostModel
from samkv_integrations.engine.prefix_cache import PrefixCache
from samkv_integrations.engine.report import Report, Stage
from samkv_integrations.engine.watch import Watch
from samkv_integrations.engine.working_cache import WorkingCache
from samkv_integrations.errors import PromptTooLong
from samkv_integrations.eviction import Eviction
from samkv_integrations.methods import Method
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.layout import Layout
from samkv_integrations.prompt.resolve import Resolved


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how to answer it.

    resolved: the prompt's tokens, and the open caches of its chunks. prefix: what chunks were
    prefilled after. stable_layers: N*, for methods that need statistics. capacity: most tokens of
    the answer. context_window: most of prompt and answer, if fewer than the model's. own_eviction:
    take the method's eviction in place of ``eviction``. costs: for a method that computes
    everything where that is faster. prefixes: beginnings of earlier prompts, None for none. chunks:
    what makes caches of missed chunks; None to leave them text. watch: sees the pass.
    """

    model: Model
    method: Method
    resolved: Resolved
    fingerprint: Fingerprint
    prefix: tuple[int, ...]
    capacity: int
    stable_layers: tuple[int, ...] = ()
    eviction: Eviction | None = None
    own_eviction: bool = False
    context_window: int | None = None
    costs: CostModel | None = None
    prefixes: PrefixCache | None = None
    chunks: Chunks | None = None
    watch: Watch | None = None

    def rule(self, *, whole: bool) -> Eviction | None:
        """What the answer goes on with; a method's own rule is none of full prefill."""
        if not self.own_eviction:
            return self.eviction
        return None if whole else self.method.eviction


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


def check_length(request: Request) -> Layout:
    """The layout of a request. Raises PromptTooLong as `first_token` does."""
    model, found = request.model, request.resolved
    layout = Layout.of(found.token_ids, found.parts, request.prefix)
    window = min(request.context_window or sys.maxsize, model.context_window)
    if layout.n_tokens + request.capacity > window:
        raise PromptTooLong(
            f"prompt of {layout.n_tokens} tokens (chunks at full size) and {request.capacity} new "
            f"tokens exceed the context window of {window} of {model.name!r}; retrieve fewer "
            "chunks or ask for fewer tokens"
        )
    return layout
