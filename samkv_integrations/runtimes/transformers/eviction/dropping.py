"""Rules that drop entries for good: while the answer is decoded, or once, after the prompt.

`StreamingLLM`, `H2O` and `SageKV` also evict during the answer. Xiao, Tian, Chen, Han, Lewis:
Efficient Streaming Language Models with Attention Sinks. Zhang et al.: Heavy-Hitter Oracle for
Efficient Generative Inference of Large Language Models. Wang et al.: LLMs Know What to Drop:
Self-Attention Guided KV Cache Eviction for Efficient Long-Context Inference.

`SnapKV` and `PyramidKV` evict once. Li et al.: LLM Knows What You are Looking for Before
Generation. Cai et al.: Dynamic KV Cache Compression based on Pyramidal Information Funneling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from samkv_integrations.errors import InvalidOption
from samkv_integrations.runtimes.transformers.eviction.base import (
    DroppingEviction,
    Keeper,
    Once,
    Seen,
    best_of_heads,
    with_ends,
)


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(DroppingEviction):
    """The first entries and the most recent ones (arXiv 2309.17453, section 3.2).

    sinks: entries at the beginning that always stay (4 in the paper).

    Deviations: entries keep their true positions. The paper counts positions inside the cache, to
        exceed the length that a model was trained for, which this engine never does.
    """

    sinks: int = 4

    name: ClassVar[str] = "streaming-llm"
    paper: ClassVar[str] = "arXiv 2309.17453"
    summary: ClassVar[str] = "the first entries and the most recent ones, sliding"
    slides: ClassVar[bool] = True
    at_least: ClassVar[Mapping[str, int]] = {"sinks": 0}

    @property
    def min_tokens(self) -> int:
        return self.sinks + 1

    @property
    def n_queries(self) -> int:
        return 0

    def keeper(self, budget: int) -> Keeper:
        recent = budget - self.sinks

        def choose(seen: Seen) -> Tensor:
            none = seen.slots.new_empty(seen.keys.shape[1], 0).to(seen.keys.device)
            return with_ends(none, seen.n_entries, first=self.sinks, last=recent)

        return Once(budget, choose, recent)


@dataclass(frozen=True, kw_only=True)
class H2O(DroppingEviction):
    """Half recent entries, half those with most attention so far (arXiv 2306.14048, section 4).

    For each key-value head, and for each token of the answer, the entry outside the recent half
    with the least accumulated attention is evicted (algorithm 1).

    Deviations: during the prompt nothing is evicted; its attention is accumulated as a whole, and
    the choice is made once, as in the authors' code. Attention is summed over the query heads that
    share a key-value head; in the paper's models none do. Only tokens computed for this question
    count as attending, not tokens loaded from chunk caches.
    """

    name: ClassVar[str] = "h2o"
    paper: ClassVar[str] = "arXiv 2306.14048"
    summary: ClassVar[str] = "entries with most accumulated attention and as many recent ones"
    slides: ClassVar[bool] = True

    @property
    def min_tokens(self) -> int:
        return 2

    def keeper(self, budget: int) -> Keeper:
        return _HeavyHitters(budget)


class _HeavyHitters(Keeper):
    def __init__(self, budget: int) -> None:
        super().__init__(budget)
        self._recent = budget // 2
        self._scores = torch.empty(0)  # (G, S) attention to each entry
        self._order = torch.empty(0)  # (G, S) age of each entry, as a counter
        self._n_seen = 0

    def prompt(self, seen: Seen) -> Tensor | None:
        n_entries, n_kv_heads, _ = seen.keys.shape
        scores = seen.keys.new_zeros(n_kv_heads, n_entries, dtype=torch.float32)
        for weights in seen.weights():
            scores += weights.sum((1, 2))
        self._n_seen = n_entries
        self._scores = scores
        self._order = torch.arange(n_entries, device=scores.device).repeat(n_kv_heads, 1)
        if n_entries <= self.budget:
            return None
        older = scores[:, None, : n_entries - self._recent]
        heavy = best_of_heads(older, self.budget - self._recent)
        slots = with_ends(heavy, n_entries, last=self._recent)
        self._scores = scores.gather(1, slots.T)
        self._order = self._order.gather(1, slots.T)
        return slots

    def step(self, seen: Seen) -> int | Tensor | None:
        given = next(seen.weights()).sum((1, 2))
        scores = given.clone()
        scores[:, :-1] += self._scores
        newest = self._order.new_full((len(scores), 1), self._n_seen)
        order = torch.cat((self._order, newest), dim=1)
        self._n_seen += 1
        self._scores, self._order = scores, order
        if seen.n_entries <= self.budget:
            return None
        recent = order >= self._n_seen - self._recent
        slot = scores.masked_fill(recent, math.inf).argmin(1)
        heads = torch.arange(len(slot), device=slot.device)
        for entries in (scores, order):
            entries[heads, slot] = entries[:, -1].clone()
        self._scores, self._order = scores[:, :-1], order[:, :-1]
        return slot


@dataclass(frozen=True, kw_only=True)
class SageKV(DroppingEviction):
    """Sinks, what the last prompt token attends to, and a recent window (section 2).

    Of a budget of B entries B/4 are the first ones and B/4 the most recent ones. Each query head
    chooses B/2 divided by the number of query heads that share a key-value head (arXiv 2503.08879,
    appendix A.2). They are chosen once; then each new entry replaces the oldest one of the recent
    window (step 4).

    Deviations: entries chosen by several query heads of a key-value head count once, and their next
        best fill the room (`best_of_heads`). The last prompt token is the newest entry of the
        recent window; the paper counts it on top. The remainder of B/4 goes to the chosen entries.
        A layer with fewer entries than the budget grows up to it first.
    """

    name: ClassVar[str] = "sage-kv"
    paper: ClassVar[str] = "arXiv 2503.08879"
    summary: ClassVar[str] = "first entries, those the last prompt token attends to, recent ones"
    slides: ClassVar[bool] = True

    @property
    def min_tokens(self) -> int:
        return 4

    @property
    def n_queries(self) -> int:
        return 1

    def keeper(self, budget: int) -> Keeper:
        end = budget // 4

        def choose(seen: Seen) -> Tensor:
            n_entries = seen.n_entries
            given = torch.cat([weights.sum(2) for weights in seen.weights(n_entries - 1)])
            chosen = best_of_heads(given[..., end : n_entries - end], budget - 2 * end) + end
            return with_ends(chosen, n_entries, first=end, last=end)

        return Once(budget, choose, end)


@dataclass(frozen=True, kw_only=True)
class SnapKV(DroppingEviction):
    """The prompt's last entries, and those that they attend to (sections 3 and 4).

    Evicts once after the prompt; the answer's entries come on top of the budget. Attention is
    summed over the window, pooled over neighbouring entries and ranked for each head (arXiv
    2404.14469, listing 1).

    window: last entries, whose attention counts and which always stay. kernel: entries of a
    neighbourhood. Defaults are those of the paper's LongBench runs, as is pooling by the maximum.

    Deviations: query heads that share a key-value head share its budget (`best_of_heads`); the
    paper's code repeats key-value heads for each query head. In the window only tokens computed
    for this question attend; the question's own tokens always are. Neighbours are counted among the
    entries that the method kept.
    """

    window: int = 32
    kernel: int = 7

    name: ClassVar[str] = "snapkv"
    paper: ClassVar[str] = "arXiv 2404.14469"
    summary: ClassVar[str] = "entries that the end of the prompt attends to, pooled; once"
    slides: ClassVar[bool] = False
    at_least: ClassVar[Mapping[str, int]] = {"window": 1, "kernel": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:
            raise InvalidOption(
                f"kernel={self.kernel} of {self.name!r}; it must be odd, so that an entry is in "
                f"the middle of its neighbourhood: give {self.kernel - 1} or {self.kernel + 1}"
            )

    @property
    def min_tokens(self) -> int:
        return self.window + 1

    @property
    def n_queries(self) -> int:
        return self.window

    def keeper(self, budget: int) -> Keeper:
        def choose(seen: Seen) -> Tensor:
            chosen = best_of_heads(self._scores(seen), budget - self.window)
            return with_ends(chosen, seen.n_entries, last=self.window)

        return Once(budget, choose)

    def _scores(self, seen: Seen) -> Tensor:
        """(G, H/G, S - window), pooled attention of the window to the entries before it."""
        before = seen.n_entries - self.window
        tiles = [weights[..., :before].sum(2) for weights in seen.weights(before)]
        given = torch.stack(tiles).sum(0)
        return F.max_pool1d(given, self.kernel, stride=1, padding=self.kernel // 2)


@dataclass(frozen=True, kw_only=True)
class PyramidKV(SnapKV):
    """`SnapKV` with budgets that fall in equal steps from the lowest layer to the highest one.

    arXiv 2406.02069, section 4.2. With b entries per layer besides the window, the highest layer
    keeps b / beta of them and the lowest 2 b - b / beta, so that the mean is b. If the prompt has
    fewer entries than that, the lowest layer keeps all, and the highest one gets the rest.

    beta: the steepness (20 in the paper). window, kernel: see `SnapKV`.

    Deviations: those of `SnapKV`. The authors' code rounds the step; here the budget of each layer
    is rounded down, so the mean never exceeds the budget. As there, a prompt shorter than 2 b gets
    the same budget in every layer. The entries of the prompt count even where a method kept fewer.
    """

    beta: int = 20

    name: ClassVar[str] = "pyramidkv"
    paper: ClassVar[str] = "arXiv 2406.02069"
    summary: ClassVar[str] = "snapkv with more entries in lower layers, fewer in higher ones"
    at_least: ClassVar[Mapping[str, int]] = {"beta": 1, **SnapKV.at_least}

    def layer_budget(self, n_tokens: int, layer: int, n_layers: int) -> int:
        budget = self.budget(n_tokens)
        mean = budget - self.window
        if n_layers == 1 or n_tokens <= budget or n_tokens < 2 * mean:
            return budget
        low = mean // self.beta
        high = min(2 * mean - low, n_tokens - self.window)
        low = 2 * mean - high
        return self.window + (high * (n_layers - 1) - (high - low) * layer) // (n_layers - 1)


STREAMING_LLM = StreamingLLM(budget_ratio=0.2)
HEAVY_HITTERS = H2O(budget_ratio=0.2)
SNAPKV = SnapKV(budget_ratio=0.2)
PYRAMIDKV = PyramidKV(budget_ratio=0.2)
SAGE_KV = SageKV(budget_ratio=0.2)
