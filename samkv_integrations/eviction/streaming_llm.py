"""StreamingLLM (arXiv 2309.17453): attention sinks and a window that slides.

Xiao, Tian, Chen, Han, Lewis: Efficient Streaming Language Models with Attention Sinks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from samkv_integrations.eviction.base import DroppingEviction, Keeper, Seen, Sliding, with_ends


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(DroppingEviction):
    """The first entries and the most recent ones (arXiv 2309.17453, section 3.2).

    sinks: entries at the beginning that always stay (the paper's 4).

    Deviations: entries keep their true positions, where the paper counts positions inside the
        cache. It does so to go beyond the length a model was trained for, which an engine that
        checks the context window never does.
    """

    sinks: int = 4

    name: ClassVar[str] = "streaming-llm"
    paper: ClassVar[str] = "arXiv 2309.17453"
    summary: ClassVar[str] = "the first entries and the most recent ones, sliding"
    slides: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._at_least("sinks", 0)
        super().__post_init__()

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

        return Sliding(budget, choose, recent)
