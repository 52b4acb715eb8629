"""The context in few bits, of which every step of an answer attends to a few tokens (Quest)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from samkv_integrations.eviction.quest import Quest
from samkv_integrations.methods.parts import ContextAttention
from samkv_integrations.model import attention
from samkv_integrations.quantise import GROUP_TOKENS, EntryFormat, groups
from samkv_integrations.rope import unrotate
from samkv_integrations.working_cache import LayerEntries, WorkingCache, as_heads

SAMPLE = 64
"""Tokens whose mean key is taken out of all keys of a layer."""


class SparseCache(WorkingCache):
    """Context tokens in few bits, at their positions, beside all other tokens as they are.

    A step scores every context token by its quantised key, and de-quantises the best alone. Keys
    are rotated here, so that scoring is one product with the codes. What a bias adds to all keys of
    a channel would spread over the range of two channels when it is rotated (Qwen2.5: hundreds,
    where the keys differ by a few), so the mean un-rotated key of a layer is taken out before, and
    its part of a logit computed apart, exactly.

    Args:
        form: how entries are held.
        cos, sin: (Tctx, D) float32, where cached keys sit.
        rule: how much a step attends to.
        capacity: tokens that the answer may add.
        weigh: how a step weighs the context against the rest, None as the model does.
    """

    def __init__(
        self,
        n_layers: int,
        form: EntryFormat,
        cos: Tensor,
        sin: Tensor,
        rule: Quest,
        capacity: int,
        weigh: ContextAttention | None = None,
    ) -> None:
        self._n_layers, self._form, self._cos, self._sin = n_layers, form, cos, sin
        self._budget = rule.budget(len(cos))
        self._capacity, self._weigh = capacity, weigh
        self._context: list[_LayerContext | None] = [None] * n_layers
        self._keys: list[Tensor] = [torch.empty(0)] * n_layers  # (S + capacity, G, D), the rest
        self._values: list[Tensor] = [torch.empty(0)] * n_layers
        self._lengths = [0] * n_layers
        self._staying = torch.empty(0), cos, sin  # of the layer taken last

    @property
    def kv_bytes(self) -> int:
        rest = 2 * sum(self._lengths) * self._keys[0][:1].nbytes
        return rest + sum(held.n_bytes for held in self._context if held is not None)

    def attended(self, n_kept: int) -> int:
        return min(self._budget, n_kept)

    def take(self, layer: int, entries: LayerEntries) -> None:
        others = entries.other_slots
        room = (0, 0, 0, 0, 0, self._capacity)
        self._keys[layer] = pad(entries.keys.index_select(0, others), room)
        self._values[layer] = pad(entries.values.index_select(0, others), room)
        self._lengths[layer] = len(others)
        if len(entries.context):
            cos, sin = self._cos_sin(entries.context)
            self._context[layer] = _LayerContext(self._form, entries, cos, sin)
        if layer == self._n_layers - 1:
            self.prompt_bytes = self.kv_bytes

    def _cos_sin(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(n, D) of the context tokens (n,) that stay; layers with the same ones share them."""
        if len(tokens) == len(self._cos):
            return self._cos, self._sin
        if tokens is not self._staying[0]:
            cos, sin = self._cos.index_select(0, tokens), self._sin.index_select(0, tokens)
            self._staying = tokens, cos, sin
        return self._staying[1:]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        length, context = self._lengths[layer], self._context[layer]
        self._keys[layer][length], self._values[layer][length] = key[0, :, 0], value[0, :, 0]
        self._lengths[layer] = length + 1
        keys, values = self._keys[layer][: length + 1], self._values[layer][: length + 1]
        n_context = 0
        if context is not None:
            best_keys, best_values = context.best(query[0, :, 0], scaling, self._budget)
            n_context = len(best_keys)
            keys, values = torch.cat((best_keys, keys)), torch.cat((best_values, values))
        keys, values = as_heads(keys), as_heads(values)
        if self._weigh is None:
            return attention(query, keys, values, scaling, None, False)
        is_context = torch.arange(keys.shape[2], device=keys.device) < n_context
        return self._weigh(query, keys, values, scaling, None, is_context)


class _LayerContext:
    """The context tokens that a layer holds: entries (n, E), at positions of cos and sin (n, D)."""

    def __init__(self, form: EntryFormat, entries: LayerEntries, cos: Tensor, sin: Tensor) -> None:
        self._form, self._cos, self._sin = form, cos, sin
        wide = entries.keys.index_select(0, entries.context_slots).float()
        if form.is_quantised:
            # Any vector near the mean does, as it is added again: that of some tokens is enough.
            some = torch.linspace(0, len(wide) - 1, min(SAMPLE, len(wide)), device=wide.device)
            some = some.long()
            self._mean = unrotate(wide[some], cos[some], sin[some]).mean(0)  # (G, D)
            self._add_mean(wide, cos, sin, -1)
        self._group = groups(len(wide), wide.device)
        codes, self._range = form.encode_keys(wide)
        held = torch.cat((codes, _value_bytes(form, entries)), dim=1)
        self._entries = pad(held, (0, 0, 0, -len(held) % GROUP_TOKENS))  # whole groups

    @property
    def n_bytes(self) -> int:
        return self._entries.nbytes + self._range.nbytes

    def _add_mean(self, keys: Tensor, cos: Tensor, sin: Tensor, sign: int) -> None:
        """Add the mean, rotated to each position, to keys (n, G, D); sign -1 takes it out."""
        keys.addcmul_(cos[:, None], self._mean, value=sign)
        keys.addcmul_(sin[:, None], self._turned, value=sign)

    @property
    def _turned(self) -> Tensor:
        half = self._form.head_dim // 2
        return torch.cat((-self._mean[:, half:], self._mean[:, :half]), dim=-1)

    def best(self, query: Tensor, scaling: float, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values (count, G, D) of the tokens that a query (H, D) attends to most.

        One choice for all heads, by the sum of their softmax over the context; in prompt order.
        """
        form = self._form
        rows = [self._entries[: len(self._group)], self._group, self._cos, self._sin]
        if count < len(self._group):
            weights = (self._logits(query) * scaling).softmax(-1).sum((0, 1))
            best = weights.topk(count).indices.sort().values
            rows = [side.index_select(0, best) for side in rows]
        entries, group, cos, sin = rows
        keys = form.keys(entries, self._range, group)
        if form.is_quantised:
            self._add_mean(keys, cos, sin, 1)
        return keys.to(form.dtype), form.values(entries)

    def _logits(self, query: Tensor) -> Tensor:
        """(G, H/G, n) float32 products of a query (H, D) with all keys."""
        form = self._form
        grouped = query.float().view(form.n_kv_heads, -1, form.head_dim)
        logits = form.key_products(self._entries, self._range, grouped)[..., : len(self._group)]
        if not form.is_quantised:
            return logits
        # The mean's part: q . R k = cos . (q1 k1 + q2 k2 | ...) + sin . (q2 k1 - q1 k2 | ...).
        return logits + self._mean_products(grouped)

    def _mean_products(self, grouped: Tensor) -> Tensor:
        """(G, H/G, n) products of queries (G, H/G, D) with the mean key at each position."""
        along, across = grouped * self._mean[:, None], grouped * self._turned[:, None]
        return along @ self._cos.T + across @ self._sin.T


def _value_bytes(form: EntryFormat, entries: LayerEntries) -> Tensor:
    """Values of the context tokens that stay: as they are stored, where nothing computed them."""
    changed = entries.changed
    if not len(changed):
        return entries.value_bytes()
    computed = entries.values.index_select(0, entries.context_slots[changed])
    if len(changed) == len(entries.context):  # maybe nothing was ever loaded
        return form.encode_values(computed)
    return entries.value_bytes().index_copy(0, changed, form.encode_values(computed))
