"""What several benchmarks and tests compare with."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from samkv_integrations.methods.guided import GuidedSelect
from samkv_integrations.prompt.layout import Layout

TRUTH = "recompute"
"""Label of full prefill, which everything else is measured against."""


@dataclass(frozen=True, kw_only=True)
class CompetingSelect(GuidedSelect):
    """Chunks compete, by the attention to the whole context: A3's choice, in the upper layers."""

    def shares(self, logits: Tensor, layout: Layout) -> Tensor:
        return logits.softmax(-1)
