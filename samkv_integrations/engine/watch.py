"""What a pass attends to and what becomes of each token, for who inspects an answer."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from samkv_integrations.engine.plan import LayerPlan, PassPlan
from samkv_integrations.methods.base import Selection
from samkv_integrations.prompt.layout import Layout


class State(IntEnum):
    """What becomes of a prompt token at one layer.

    uncached: outside chunks, and computed. missed: of a chunk without a usable cache, and computed.
    kept: its stored entry is used. recomputed: it has a stored entry, and is computed again.
    dropped: its stored entry is not used.
    """

    UNCACHED = 0
    MISSED = 1
    KEPT = 2
    RECOMPUTED = 3
    DROPPED = 4


class Watch:
    """Sees the pass of one request that gives the first token. Nothing depends on what it sees.

    It is complete once `first_token` has returned.
    """

    def __init__(self) -> None:
        self._attention: dict[int, Tensor] = {}
        self._seen: tuple[Layout, Selection, PassPlan] | None = None

    def see_layer(
        self,
        layer: int,
        layout: Layout,
        plan: LayerPlan,
        query: Tensor,
        keys: Tensor,
        scaling: float,
    ) -> None:
        """A layer of the pass. query: (H, D) of the last token. keys: (S, G, D), all it sees."""
        n_kv_heads, head_dim = keys.shape[1:]
        grouped = query.float().view(n_kv_heads, -1, head_dim) * scaling
        logits = torch.einsum("grd,sgd->grs", grouped, keys.float()).flatten(0, 1)
        if plan.mask is not None:
            hidden = ~plan.mask[-1] if plan.mask.dtype == torch.bool else plan.mask[-1] < 0
            logits = logits.masked_fill(hidden, -torch.inf)
        sides = (
            torch.arange(plan.n_held),
            layout.context_positions[plan.cached.cpu()],
            plan.positions.cpu(),
        )
        spread = torch.zeros(layout.n_tokens)
        spread[torch.cat(sides)[plan.source.cpu()]] = logits.softmax(-1).mean(0).cpu()
        self._attention[layer] = spread

    def see_plan(self, layout: Layout, selection: Selection, plan: PassPlan) -> None:
        """The layout, what was selected, and what the layers did in the end."""
        self._seen = layout, selection, plan

    @property
    def layout(self) -> Layout:
        return self._complete[0]

    @property
    def token_scores(self) -> Tensor | None:
        """(Tctx,) see `Selection`."""
        scores = self._complete[1].token_scores
        return None if scores is None else scores.float().cpu()

    @property
    def attention(self) -> Tensor:
        """(L, T) share of the last token's attention that each token has, mean over heads."""
        return torch.stack([self._attention[at] for at in sorted(self._attention)])

    @property
    def states(self) -> Tensor:
        """(L, T) uint8, a `State` each; `State.UNCACHED` for all that has no stored entry."""
        layout, _, plan = self._complete
        at = layout.context_positions
        states = torch.full((len(plan.layers), layout.n_tokens), State.UNCACHED, dtype=torch.uint8)
        for row, layer in zip(states, plan.layers, strict=True):
            context = layer.context.cpu()
            of_context = torch.full((layout.n_context,), State.DROPPED, dtype=torch.uint8)
            of_context[context] = State.KEPT
            of_context[context[layer.changed.cpu()]] = State.RECOMPUTED
            row[at] = of_context
            row[at[layout.uncached[at]]] = State.RECOMPUTED  # the last one of a prompt, if any
        return states

    @property
    def _complete(self) -> tuple[Layout, Selection, PassPlan]:
        assert self._seen is not None, "no first token has been computed"
        return self._seen
