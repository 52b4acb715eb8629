"""The context in few bits, of which every step of an answer attends to a few tokens (Quest)."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from samkv_integrations.cache.quantise import Entries
from samkv_integrations.engine.one_thread import on_one_thread
from samkv_integrations.engine.working_cache import LayerEntries, WorkingCache, as_heads
from samkv_integrations.methods.base import ContextAttention
from samkv_integrations.model.attention import attention

_LEAST = torch.finfo(torch.float32).tiny


class StoredContext(Protocol):
    """Where the entries of the context are read, see `loader.Context`."""

    def entries(self, layer: int, tokens: Tensor) -> Entries:
        """Those of context tokens (n,), in order."""
        ...


class SparseCache(WorkingCache):
    """Context tokens in the bytes that were read, beside all other tokens as they are.

    A step computes the keys of the context, one layer at a time, attends to the tokens of the
    largest softmax, summed over heads, and forgets the keys again. All other tokens are attended to
    as one, whose weight is the sum of theirs and whose value is the context's mean (SparQ
    Attention, arXiv 2312.04985, section 3); not where a method weighs the context in its own way.

    ``kv_bytes`` leaves out the cos and sin of the context's positions, which all layers share.

    Args:
        context: asked for the entries of a layer when that is taken.
        budget: context tokens that a step attends to.
        capacity: tokens that the answer may add.
        weigh: how a step weighs the context against the rest, None as the model does.
    """

    def __init__(
        self,
        n_layers: int,
        context: StoredContext,
        budget: int,
        capacity: int,
        weigh: ContextAttention | None = None,
    ) -> None:
        self._n_layers, self._stored = n_layers, context
        self._budget, self._capacity, self._weigh = budget, capacity, weigh
        self._context: list[Entries | None] = [None] * n_layers
        self._mean_value: list[Tensor] = [torch.empty(0)] * n_layers  # (1, G, D), of the context
        self._keys: list[Tensor] = [torch.empty(0)] * n_layers  # (S + capacity, G, D), the rest
        self._values: list[Tensor] = [torch.empty(0)] * n_layers
        self._lengths = [0] * n_layers
        self._n_context = [0] * n_layers

    @property
    def kv_bytes(self) -> int:
        rest = 2 * sum(self._lengths) * self._keys[0][:1].nbytes
        means = sum(mean.nbytes for mean in self._mean_value)
        return rest + means + sum(held.n_bytes for held in self._context if held is not None)

    def attended(self, layer: int, of_chunks: Tensor) -> float:
        left_out = max(0, self._n_context[layer] - self._budget)
        return super().attended(layer, of_chunks) - left_out

    def take(self, layer: int, entries: LayerEntries) -> None:
        others = entries.other_slots
        room = (0, 0, 0, 0, 0, self._capacity)
        self._keys[layer] = pad(entries.keys.index_select(0, others), room)
        self._values[layer] = pad(entries.values.index_select(0, others), room)
        self._lengths[layer], self._n_context[layer] = len(others), len(entries.context)
        if len(entries.context):
            computed = entries.context_slots[entries.changed]
            self._context[layer] = self._stored.entries(layer, entries.context).with_computed(
                entries.changed,
                entries.keys.index_select(0, computed),
                entries.values.index_select(0, computed),
            )
            of_context = entries.values.index_select(0, entries.context_slots)
            self._mean_value[layer] = of_context.mean(0, keepdim=True)
        if layer == self._n_layers - 1:
            self.prompt_bytes = self.kv_bytes

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        attend = partial(self._attend, layer, query, key, value, scaling)
        return on_one_thread(attend) if query.device.type == "cpu" else attend()

    def _attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        length, context = self._lengths[layer], self._context[layer]
        self._keys[layer][length], self._values[layer][length] = key[0, :, 0], value[0, :, 0]
        self._lengths[layer] = length + 1
        parts = [(self._keys[layer][: length + 1], self._values[layer][: length + 1])]
        n_context, rest_logit, mask = 0, None, None
        if context is not None:
            if self._budget < len(context):
                best, rest_logit = self._choose(context, query[0, :, 0], scaling)
                context = context.select(best)
            n_context = len(context)
            parts.insert(0, (context.keys(), context.values()))
        if rest_logit is not None:
            # A key of zeros has a logit of 0 with every query, to which the mask adds. All
            # logits are moved alike, or the dtype's rounding would be of so large a number.
            mean_value = self._mean_value[layer]
            parts.append((torch.zeros_like(mean_value), mean_value))
            moved = rest_logit.to(query.dtype)
            mask = -moved[None, :, None, None].repeat(1, 1, 1, n_context + length + 2)
            mask[0, :, 0, -1] = rest_logit - moved.float()
        keys, values = (as_heads(torch.cat(side)) for side in zip(*parts, strict=True))
        if self._weigh is None:
            return attention(query, keys, values, scaling, mask, False)
        is_context = torch.arange(keys.shape[2], device=keys.device) < n_context
        return self._weigh(query, keys, values, scaling, None, is_context)

    def _choose(
        self, context: Entries, query: Tensor, scaling: float
    ) -> tuple[Tensor, Tensor | None]:
        """What a query (H, D) attends to: tokens, in order, and the logit of the rest.

        One choice for all heads. The logit is (H,), None if nobody wants it.
        """
        logits = context.logits(query).flatten(0, 1).mul_(scaling)
        top = logits.amax(-1, keepdim=True)
        weights = logits.sub_(top).exp_()  # of each head (H, n), over that of its largest
        scores = weights.sum(-1).reciprocal() @ weights  # the softmax, summed over heads
        best = scores.topk(self._budget, sorted=False).indices.sort().values
        if self._weigh is not None:
            return best, None
        rest = weights.index_fill_(-1, best, 0).sum(-1)
        return best, top[:, 0] + rest.clamp_min(_LEAST).log()
