"""The cache whose context is in few bits, against loops and against the entries it was given."""

from __future__ import annotations

import math
from functools import cache
from threading import Thread

import pytest
import torch
from torch import Tensor

from samkv_integrations.cache.formats.quantise import (
    GROUP_TOKENS,
    Entries,
    EntryFormat,
    groups,
    unrotate,
)
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.working_cache import LayerEntries, SparseCache
from samkv_integrations.eviction import Quest, RetrievalAttention
from samkv_integrations.eviction.base import SparseEviction
from samkv_integrations.methods.base import ContextAttention
from samkv_integrations.model.model import Model
from tests.support.asking import ask
from tests.support.chunks import transformed
from tests.support.laws import CHUNKS, FOLLOW, PROMPT
from tests.support.models import byte_tokenizer, hf_model, tiny_model

GROUPS, HEADS, DIM, SCALING = 2, 6, 8, 0.4
CONTEXT = 100
BITS = (4, 8, 16)
QUEST = Quest(budget_ratio=1.0)
"""The rule; the cache's budget is another argument."""


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def places(n: int) -> tuple[Tensor, Tensor]:
    """(n, D) cos and sin of n places."""
    turns = torch.arange(n)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    angle = torch.cat((turns, turns), dim=1)
    return angle.cos(), angle.sin()


def form_of(bits: int) -> EntryFormat:
    return EntryFormat(bits=bits, n_kv_heads=GROUPS, head_dim=DIM, dtype=torch.float32)


class Stored:
    """A context of 100 tokens as a request has read it; of one value, if there is one."""

    def __init__(self, seed: int, bits: int, value: float | None = None) -> None:
        self.form = form_of(bits)
        values = normal(seed + 1, CONTEXT, GROUPS, DIM)
        codes, key_range = self.form.encode(
            2 * normal(seed, CONTEXT, GROUPS, DIM),
            values if value is None else torch.full_like(values, value),
        )
        cos, sin = (
            side[:, None, : DIM // 2].expand(-1, GROUPS, -1).contiguous()
            for side in places(CONTEXT)
        )
        self.all = Entries(
            form=self.form, codes=codes, key_range=key_range,
            group=groups(CONTEXT, codes.device), cos=cos, sin=sin,
        )  # fmt: skip

    def entries(self, layer: int, tokens: Tensor) -> Entries:
        assert layer == 0
        return self.all if len(tokens) == CONTEXT else self.all.select(tokens)


def entries_of(seed: int, is_context: Tensor, tokens: Tensor, stored: Stored) -> LayerEntries:
    """What a pass leaves of a layer: ``tokens`` of the context at the true places, others around.

    Every third context token was computed: its entry is not what is stored of it.
    """
    n = len(is_context)
    at, other = is_context.nonzero()[:, 0], (~is_context).nonzero()[:, 0]
    assert len(at) == len(tokens)
    keys, values = 2 * normal(seed + 2, n, GROUPS, DIM), normal(seed + 3, n, GROUPS, DIM)
    changed = torch.arange(0, len(tokens), 3)
    read = torch.ones(len(tokens), dtype=torch.bool)
    read[changed] = False
    keys[at[read]] = stored.all.keys()[tokens[read]]
    values[at[read]] = stored.all.values()[tokens[read]]
    return LayerEntries(
        keys=keys, values=values, n_entries=n, is_context=is_context, context=tokens,
        context_slots=at, other_slots=other, changed=changed,
        queries=torch.empty(HEADS, 0, DIM), query_slots=torch.empty(0).long(), scaling=SCALING,
    )  # fmt: skip


class Case:
    """A context of 100 tokens, of which a layer holds some, between twelve others."""

    def __init__(
        self,
        seed: int,
        bits: int,
        budget: int,
        held: float = 0.8,
        weigh: ContextAttention | None = None,
        value: float | None = None,
        rule: SparseEviction = QUEST,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = (torch.rand(CONTEXT, generator=generator) < held).nonzero()[:, 0]
        is_context = torch.zeros(len(self.tokens) + 12, dtype=torch.bool)
        shuffled = torch.randperm(len(is_context), generator=generator)
        is_context[shuffled[: len(self.tokens)]] = True
        self.cos, self.sin = places(CONTEXT)
        self.stored = Stored(seed, bits, value)
        self.given = entries_of(seed, is_context, self.tokens, self.stored)
        if value is not None:
            self.given.values[self.given.context_slots] = value
        self.cache = SparseCache(1, self.stored, rule, budget, 5, weigh)
        self.cache.take(0, self.given)

    def held(self) -> tuple[Tensor, Tensor]:
        """(n, G, D) keys and values of all context tokens, as such a cache has them.

        Told by a method's own attention, which sees all of them where the budget has room.
        """
        seen: list[tuple[Tensor, Tensor]] = []

        def weigh(
            query: Tensor, keys: Tensor, values: Tensor, scaling: float, mask: Tensor | None,
            is_context: Tensor,
        ) -> Tensor:  # fmt: skip
            seen.append((keys[0, :, is_context], values[0, :, is_context]))
            return query

        cache = SparseCache(1, self.stored, QUEST, CONTEXT, 1, weigh)
        cache.take(0, self.given)
        one = torch.ones(1, GROUPS, 1, DIM)
        cache.attend(0, torch.ones(1, HEADS, 1, DIM), one, one, SCALING)
        ((keys, values),) = seen
        return keys.transpose(0, 1), values.transpose(0, 1)

    def others(self) -> tuple[Tensor, Tensor]:
        at = self.given.other_slots
        return self.given.keys[at], self.given.values[at]

    def mean_value(self) -> Tensor:
        """(G, D) of the context."""
        values = self.given.values[self.given.context_slots].double()
        return (values.sum(0) / len(values)).float()


def logits_of_head(query: Tensor, keys: Tensor, head: int) -> list[float]:
    """Of the keys (n, G, D), number by number."""
    group = head * GROUPS // HEADS
    return [
        SCALING * sum(a * b for a, b in zip(query[head].tolist(), key[group], strict=True))
        for key in keys.tolist()
    ]


def loop_weights(query: Tensor, keys: Tensor) -> list[float]:
    """[token]: its softmax over the context, summed over heads."""
    total = [0.0] * len(keys)
    for head in range(HEADS):
        logits = logits_of_head(query, keys, head)
        top = max(logits)
        weights = [math.exp(x - top) for x in logits]
        for token, weight in enumerate(weights):
            total[token] += weight / sum(weights)
    return total


def slow_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    left_out: Tensor | None = None,
    mean_value: Tensor | None = None,
) -> Tensor:
    """(H, D) over (n, G, D); keys ``left_out`` take their weights, and all have one value."""
    heads = []
    for head in range(HEADS):
        group = head * GROUPS // HEADS
        weights = [math.exp(x) for x in logits_of_head(query, keys, head)]
        total = sum(w * value for w, value in zip(weights, values[:, group], strict=True))
        share = sum(weights)
        if left_out is not None:
            rest = sum(math.exp(x) for x in logits_of_head(query, left_out, head))
            total, share = total + rest * mean_value[group], share + rest
        heads.append(total / share)
    return torch.stack(heads)


# --- what a step attends to --------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("budget", [64, 70])
def test_a_step_attends_to_the_tokens_of_the_largest_summed_softmax(bits: int, budget: int) -> None:
    """Of all heads together; to all that is no context; and to the rest as one.

    The scores of the loop and of the cache differ by rounding, 1e-6 of a score of at most 6; the
    order of two tokens nearer than that is not looked at.
    """
    for seed in range(4):
        case = Case(seed, bits, budget)
        keys, values = case.held()
        assert len(keys) > budget
        query = normal(seed + 7, HEADS, DIM)
        scores = loop_weights(query, keys)
        ranked = sorted(range(len(scores)), key=lambda t: -scores[t])
        assert scores[ranked[budget - 1]] - scores[ranked[budget]] > 1e-6
        chosen, left_out = sorted(ranked[:budget]), ranked[budget:]
        new_key, new_value = normal(seed + 8, GROUPS, DIM), normal(seed + 9, GROUPS, DIM)
        output = case.cache.attend(
            0, query[None, :, None], new_key[None, :, None], new_value[None, :, None], SCALING
        )
        other_keys, other_values = case.others()
        expected = slow_attention(
            query,
            torch.cat((keys[chosen], other_keys, new_key[None])),
            torch.cat((values[chosen], other_values, new_value[None])),
            keys[left_out],
            case.mean_value(),
        )
        torch.testing.assert_close(output[0, :, 0], expected, rtol=1e-5, atol=1e-5)


def test_tokens_that_a_rule_leaves_out_have_no_weight() -> None:
    rule = RetrievalAttention(budget_ratio=1.0, first=3, last=5)
    case = Case(5, 16, 20, rule=rule)
    keys, values = case.held()
    query, new = normal(1, HEADS, DIM), normal(2, 2, GROUPS, DIM)
    logits = torch.tensor([logits_of_head(query, keys, head) for head in range(HEADS)])
    chooser = rule.chooser(20, case.given.seen, case.given.context_slots)
    chosen, _ = chooser.choose(query, logits.clone)
    output = case.cache.attend(
        0, query[None, :, None], new[0][None, :, None], new[1][None, :, None], SCALING
    )
    other_keys, other_values = case.others()
    expected = slow_attention(
        query,
        torch.cat((keys[chosen], other_keys, new[:1])),
        torch.cat((values[chosen], other_values, new[1:])),
    )
    torch.testing.assert_close(output[0, :, 0], expected, rtol=1e-5, atol=1e-5)
    n_all = len(case.given.is_context)
    assert case.cache.attended(0, case.given.is_context) == 20 < n_all - 12


@pytest.mark.parametrize("bits", BITS)
def test_every_step_chooses_anew_and_sees_the_steps_before(bits: int) -> None:
    case = Case(3, bits, 64)
    keys, values = case.held()
    rest_keys, rest_values = case.others()
    choices = set()
    for step in range(4):
        query, key, value = (normal(20 + 3 * step + i, n, DIM) for i, n in
                             enumerate((HEADS, GROUPS, GROUPS)))  # fmt: skip
        scores = loop_weights(query, keys)
        ranked = sorted(range(len(scores)), key=lambda t: -scores[t])
        chosen, left_out = sorted(ranked[:64]), ranked[64:]
        choices.add(tuple(chosen))
        rest_keys = torch.cat((rest_keys, key[None]))
        rest_values = torch.cat((rest_values, value[None]))
        output = case.cache.attend(
            0, query[None, :, None], key[None, :, None], value[None, :, None], SCALING
        )
        expected = slow_attention(
            query, torch.cat((keys[chosen], rest_keys)), torch.cat((values[chosen], rest_values)),
            keys[left_out], case.mean_value(),
        )  # fmt: skip
        torch.testing.assert_close(output[0, :, 0], expected, rtol=1e-5, atol=1e-5)
    assert len(choices) == 4


def test_a_step_with_room_for_all_leaves_nothing_out() -> None:
    for budget in (len(Case(4, 8, 64).tokens), 1000):
        case = Case(4, 8, budget)
        query, new = normal(1, HEADS, DIM), normal(2, 2, GROUPS, DIM)
        output = case.cache.attend(
            0, query[None, :, None], new[0][None, :, None], new[1][None, :, None], SCALING
        )
        (keys, values), (other_keys, other_values) = case.held(), case.others()
        expected = slow_attention(
            query,
            torch.cat((keys, other_keys, new[:1])),
            torch.cat((values, other_values, new[1:])),
        )
        torch.testing.assert_close(output[0, :, 0], expected, rtol=1e-5, atol=1e-5)


def context_alone(form: EntryFormat, keys: Tensor, values: Tensor) -> tuple[SparseCache, Entries]:
    """A cache of a context at no positions, and its entries; a step attends to 64 of them."""
    n = len(keys)
    codes, key_range = form.encode(keys, values)
    nowhere = torch.ones(n, GROUPS, DIM // 2)
    stored = Stored(0, 16)
    stored.all = Entries(
        form=form, codes=codes, key_range=key_range, group=groups(n, codes.device),
        cos=nowhere, sin=torch.zeros_like(nowhere),
    )  # fmt: skip
    at = torch.arange(n)
    cache = SparseCache(1, stored, QUEST, 64, 1)
    cache.take(
        0,
        LayerEntries(
            keys=stored.all.keys(), values=stored.all.values(), n_entries=n,
            is_context=torch.ones(n, dtype=torch.bool), context=at, context_slots=at,
            other_slots=at[:0], changed=at[:0], queries=torch.empty(HEADS, 0, DIM),
            query_slots=at[:0], scaling=SCALING,
        ),
    )  # fmt: skip
    return cache, stored.all


@pytest.mark.parametrize("height", [1.0, 60.0, 1000.0])
def test_large_logits_do_not_round_the_weight_of_the_rest(height: float) -> None:
    """In bfloat16, whose numbers near 1000 are 4 apart: biases of queries and keys go that far.

    Against double precision on the same keys and values; 2^-8 is bfloat16's relative error, of
    weights and of the output.
    """
    form = EntryFormat(bits=16, n_kv_heads=GROUPS, head_dim=DIM, dtype=torch.bfloat16)
    keys, values = normal(0, CONTEXT, GROUPS, DIM), normal(1, CONTEXT, GROUPS, DIM)
    keys[..., 0] = 8
    cache, entries = context_alone(form, keys.bfloat16(), values.bfloat16())
    query = normal(2, HEADS, DIM)
    query[:, 0] = height / 8 / SCALING
    query = query.bfloat16()
    key, value = keys[:1].bfloat16(), values[:1].bfloat16()
    output = cache.attend(
        0, query[None, :, None], key[0][None, :, None], value[0][None, :, None], SCALING
    )
    held = torch.cat((entries.keys(), key)).double()
    grouped = query.double().view(GROUPS, -1, DIM)
    logits = torch.einsum("grd,tgd->grt", grouped, held) * SCALING
    best = logits[..., :-1].softmax(-1).sum((0, 1)).topk(64).indices
    by_value = entries.values().double().mean(0, keepdim=True).repeat(CONTEXT + 1, 1, 1)
    by_value[best], by_value[-1] = entries.values().double()[best], value[0].double()
    expected = torch.einsum("grt,tgd->grd", logits.softmax(-1), by_value).flatten(0, 1)
    torch.testing.assert_close(output[0, :, 0].double(), expected, rtol=0.02, atol=0.02)


def test_a_method_s_own_attention_is_told_what_is_context() -> None:
    seen: list[Tensor] = []

    def weigh(
        query: Tensor, keys: Tensor, values: Tensor, scaling: float, mask: Tensor | None,
        is_context: Tensor,
    ) -> Tensor:  # fmt: skip
        seen.append(is_context)
        assert mask is None and keys.shape == values.shape == (1, GROUPS, len(is_context), DIM)
        return query

    case = Case(5, 4, 64, weigh=weigh)
    one = torch.ones(1, GROUPS, 1, DIM)
    case.cache.attend(0, torch.ones(1, HEADS, 1, DIM), one, one, SCALING)
    assert seen[0].tolist() == [True] * 64 + [False] * (len(case.given.other_slots) + 1)


# --- what is held ------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("held", [0.3, 1.0])
def test_what_was_read_is_held_as_it_is_and_what_was_computed_within_half_a_step(
    bits: int, held: float
) -> None:
    """Of the range that a channel of its transform has among 64 computed tokens, un-rotated; a step
    is 1/15 or 1/255 of that. 1e-5 for what rounding to float32 does to keys of about 10."""
    case = Case(11, bits, 64, held)
    at, changed = case.given.context_slots, case.given.changed
    true_keys, true_values = case.given.keys[at], case.given.values[at]
    keys, values = case.held()
    read = torch.ones(len(at), dtype=torch.bool)
    read[changed] = False
    assert 0 < len(changed) < len(at)
    assert torch.equal(keys[read], true_keys[read])
    assert torch.equal(values[read], true_values[read])
    cos, sin = case.cos[case.tokens[changed]], case.sin[case.tokens[changed]]
    true_keys, keys = (unrotate(side[changed], cos, sin) for side in (true_keys, keys))
    true_values, values = true_values[changed], values[changed]
    if bits == 16:
        torch.testing.assert_close(keys, true_keys, rtol=0, atol=1e-5)
        assert torch.equal(values, true_values)
        return
    for rows in torch.arange(len(changed)).split(GROUP_TOKENS):
        low, high = transformed(true_keys[rows]).aminmax(dim=0)
        step = (high - low + 2.0**-10 * low.abs()) / (2**bits - 1) * 1.001
        error = transformed((keys - true_keys)[rows]).abs()
        assert bool((error <= step / 2 + 1e-5).all())
    span = true_values.amax(-1, keepdim=True) - true_values.amin(-1, keepdim=True)
    # scale and offset of values are half precision: 2^-10 of a value more
    assert bool(((values - true_values).abs() <= span / (2**bits - 1) / 2 * 1.01 + 0.004).all())


# --- keys that a bias has moved ----------------------------------------------------------------


@cache
def biased_model(strength: float) -> Model:
    """A Qwen2 whose keys have channels of hundreds, as Qwen2.5's k_proj bias makes them."""
    hf = hf_model("qwen2")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in hf.model.layers:
            bias = layer.self_attn.k_proj.bias
            for channel in torch.randperm(len(bias), generator=generator)[:6].tolist():
                bias[channel] = strength * (400.0 if channel % 2 else -250.0)
            # queries hardly look there, or every softmax would be of one token
            layer.self_attn.q_proj.weight.mul_(0.3)
            layer.self_attn.q_proj.bias.zero_()
    return Model(hf, byte_tokenizer(bos=False), "tiny-biased")


def divergence(p: Tensor, q: Tensor) -> float:
    """KL(p || q) of logits, mean over tokens, in nats."""
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


def logits_of(bits: int, eviction: Quest | str, strength: float = 1.0) -> Tensor:
    """Of the first token, and after each of eight more that see the whole context."""
    engine = Engine(biased_model(strength), block_size=8, store_bits=bits, prefix="bos")
    for chunk in CHUNKS:
        engine.cache_chunks([chunk])
    return engine.logits(PROMPT, CHUNKS, follow=FOLLOW, method="reuse", eviction=eviction)


@pytest.mark.parametrize("bits", [4, 8])
def test_keys_with_a_large_constant_a_channel_lose_nothing(bits: int) -> None:
    """Neither the first token, nor eight after it, by either cache.

    They are about as near to 16 bits as in the same model without these constants: the error is
    within four times that one, so the divergence within 16 times. Codes on both sides of 0 would
    have 37 times (650 times in 8 bits) the divergence. The two caches hold the same entries, so
    they agree to float32 sums in another order.
    """
    everything = Quest(budget_ratio=1.0)
    exact, dense = logits_of(16, "none"), logits_of(bits, "none")
    plain = [logits_of(b, "none", strength=0.0) for b in (16, bits)]
    assert 0 < divergence(exact, dense) < 16 * divergence(*plain)
    sparse = logits_of(bits, everything)
    assert torch.equal(sparse[0], dense[0]), "the first token never sees this cache"
    torch.testing.assert_close(sparse, dense, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("bits", [4, 8])
def test_room_for_all_is_no_eviction_but_for_what_was_computed(family: str, bits: int) -> None:
    """Against the dense cache after the same pass, which keeps computed entries as they are.

    With nothing recomputed both hold the same, to the bit. With all of it, as near as the entries
    of a store, which were rounded as well: within twice, for another draw of rounding.
    """
    engine = Engine(tiny_model(family), block_size=8, store_bits=bits)
    engine.cache_chunks(CHUNKS)
    everything = Quest(budget_ratio=1.0)
    sparse, dense = (
        ask(engine, PROMPT, CHUNKS, "reuse", eviction=rule).follow(FOLLOW)
        for rule in (everything, "none")
    )
    torch.testing.assert_close(sparse, dense, rtol=1e-5, atol=1e-5)
    computed, true = (
        ask(engine, PROMPT, CHUNKS, "recompute", eviction=rule).follow(FOLLOW)
        for rule in (everything, "none")
    )
    exact = Engine(tiny_model(family), block_size=8, store_bits=16)
    exact.cache_chunks(CHUNKS)
    as_stored = ask(exact, PROMPT, CHUNKS, "reuse", eviction="none").follow(FOLLOW)
    off, by_store = (
        float((a - b).square().mean().sqrt()) for a, b in ((computed, true), (dense, as_stored))
    )
    assert 0 < off < 2 * by_store


def test_a_step_takes_one_thread_and_leaves_all_others_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Threads that begin in its midst too, which take the process's number for good."""
    seen: list[int] = []
    of_others: list[int] = []
    logits = Entries.logits

    def noted(self: Entries, query: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        other = Thread(target=lambda: of_others.append(torch.get_num_threads()))
        other.start()
        other.join()
        return logits(self, query)

    monkeypatch.setattr(Entries, "logits", noted)
    before = torch.get_num_threads()
    engine = Engine(tiny_model("llama"), block_size=8)
    engine.cache_chunks(CHUNKS)
    torch.set_num_threads(3)
    try:
        with_three = engine.logits(PROMPT, method="reuse", eviction="quest", follow=FOLLOW)
        assert engine.scheduler.run(torch.get_num_threads) == 3
    finally:
        torch.set_num_threads(before)
    assert (set(seen), set(of_others)) == ({1}, {3})
    alone = engine.logits(PROMPT, method="reuse", eviction="quest", follow=FOLLOW)
    torch.testing.assert_close(with_three, alone, rtol=0, atol=1e-4)
