"""The cache whose context is in few bits, against loops and against the entries it was given."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor

from samkv_integrations import sparse_cache
from samkv_integrations.engine import Engine
from samkv_integrations.eviction import Quest
from samkv_integrations.methods.parts import ContextAttention
from samkv_integrations.model import Model
from samkv_integrations.quantise import GROUP_TOKENS, EntryFormat
from samkv_integrations.rope import rotate, unrotate
from samkv_integrations.sparse_cache import SAMPLE, SparseCache
from samkv_integrations.working_cache import LayerEntries
from tests.asking import ask
from tests.chunks import transformed
from tests.models import byte_tokenizer, hf_model, tiny_model
from tests.test_limit_laws import CHUNKS, FOLLOW, PROMPT

GROUPS, HEADS, DIM, SCALING = 2, 6, 8, 0.4
BITS = (4, 8, 16)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def places(n: int) -> tuple[Tensor, Tensor]:
    """(n, D) cos and sin of n places."""
    turns = torch.arange(n)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    angle = torch.cat((turns, turns), dim=1)
    return angle.cos(), angle.sin()


def entries_of(seed: int, is_context: Tensor, tokens: Tensor, form: EntryFormat) -> LayerEntries:
    """Random entries of a layer: ``tokens`` of the context at the true places, others around.

    Every third context token was computed: what is stored of it is not its value.
    """
    n = len(is_context)
    at, other = is_context.nonzero()[:, 0], (~is_context).nonzero()[:, 0]
    assert len(at) == len(tokens)
    values, changed = normal(seed + 1, n, GROUPS, DIM), torch.arange(0, len(tokens), 3)
    stored = form.encode_values(values[at])
    stored[changed] = 255
    return LayerEntries(
        keys=2 * normal(seed, n, GROUPS, DIM), values=values, value_bytes=stored.clone,
        n_entries=n, is_context=is_context, context=tokens, context_slots=at, other_slots=other,
        changed=changed, queries=torch.empty(HEADS, 0, DIM), query_slots=torch.empty(0).long(),
        scaling=SCALING,
    )  # fmt: skip


def form_of(bits: int) -> EntryFormat:
    return EntryFormat(bits=bits, n_kv_heads=GROUPS, head_dim=DIM, dtype=torch.float32)


class Case:
    """A context of 100 tokens, of which a layer holds some, between twelve others."""

    def __init__(
        self,
        seed: int,
        bits: int,
        budget: int,
        held: float = 0.8,
        weigh: ContextAttention | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = (torch.rand(100, generator=generator) < held).nonzero()[:, 0]
        is_context = torch.zeros(len(self.tokens) + 12, dtype=torch.bool)
        shuffled = torch.randperm(len(is_context), generator=generator)
        is_context[shuffled[: len(self.tokens)]] = True
        self.cos, self.sin = places(100)
        self.form = form_of(bits)
        self.given = entries_of(seed, is_context, self.tokens, self.form)
        rule = Quest(budget_tokens=budget)
        self.cache = SparseCache(1, self.form, self.cos, self.sin, rule, 5, weigh)
        self.cache.take(0, self.given)

    def held(self) -> tuple[Tensor, Tensor]:
        """(n, G, D) keys and values of all context tokens, as the cache gives them back."""
        context = self.cache._context[0]
        return context.best(torch.zeros(HEADS, DIM), SCALING, len(self.tokens))

    def others(self) -> tuple[Tensor, Tensor]:
        at = self.given.other_slots
        return self.given.keys[at], self.given.values[at]


def loop_weights(query: Tensor, keys: Tensor) -> list[float]:
    """[token]: its softmax over the context, summed over heads, number by number."""
    total = [0.0] * len(keys)
    for head in range(HEADS):
        group = head * GROUPS // HEADS
        logits = [
            SCALING * sum(a * b for a, b in zip(query[head].tolist(), key[group], strict=True))
            for key in keys.tolist()
        ]
        top = max(logits)
        weights = [math.exp(x - top) for x in logits]
        for token, weight in enumerate(weights):
            total[token] += weight / sum(weights)
    return total


def slow_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """(H, D) over (n, G, D)."""
    heads = []
    for head in range(HEADS):
        group = head * GROUPS // HEADS
        weights = (SCALING * keys[:, group] @ query[head]).softmax(0)
        heads.append(weights @ values[:, group])
    return torch.stack(heads)


# --- what a step attends to --------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("budget", [64, 70])
def test_a_step_attends_to_the_tokens_of_the_largest_summed_softmax(bits: int, budget: int) -> None:
    """Of all heads together, by the keys as they are held; and to all that is no context.

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
        chosen = sorted(ranked[:budget])
        found_keys, found_values = case.cache._context[0].best(query, SCALING, budget)
        assert torch.equal(found_keys, keys[chosen])
        assert torch.equal(found_values, values[chosen])
        new_key, new_value = normal(seed + 8, GROUPS, DIM), normal(seed + 9, GROUPS, DIM)
        output = case.cache.attend(
            0, query[None, :, None], new_key[None, :, None], new_value[None, :, None], SCALING
        )
        other_keys, other_values = case.others()
        expected = slow_attention(
            query,
            torch.cat((keys[chosen], other_keys, new_key[None])),
            torch.cat((values[chosen], other_values, new_value[None])),
        )
        torch.testing.assert_close(output[0, :, 0], expected, rtol=1e-5, atol=1e-5)


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
        chosen = sorted(sorted(range(len(scores)), key=lambda t: -scores[t])[:64])
        choices.add(tuple(chosen))
        rest_keys = torch.cat((rest_keys, key[None]))
        rest_values = torch.cat((rest_values, value[None]))
        output = case.cache.attend(
            0, query[None, :, None], key[None, :, None], value[None, :, None], SCALING
        )
        expected = slow_attention(
            query, torch.cat((keys[chosen], rest_keys)), torch.cat((values[chosen], rest_values))
        )
        torch.testing.assert_close(output[0, :, 0], expected, rtol=1e-5, atol=1e-5)
    assert len(choices) == 4


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


def test_a_layer_without_context_attends_to_the_rest() -> None:
    cos, sin = places(100)
    cache = SparseCache(1, form_of(4), cos, sin, Quest(budget_tokens=64), 3)
    none = torch.empty(0).long()
    given = entries_of(0, torch.zeros(6, dtype=torch.bool), none, form_of(4))
    cache.take(0, given)
    query, new = normal(1, HEADS, DIM), normal(2, 2, GROUPS, DIM)
    output = cache.attend(
        0, query[None, :, None], new[0][None, :, None], new[1][None, :, None], SCALING
    )
    expected = slow_attention(
        query, torch.cat((given.keys, new[:1])), torch.cat((given.values, new[1:]))
    )
    torch.testing.assert_close(output[0, :, 0], expected, rtol=1e-5, atol=1e-5)
    assert cache.attended(0) == 0


# --- what is held ------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("held", [0.3, 1.0])
def test_entries_come_back_within_half_a_step(bits: int, held: float) -> None:
    """At their positions, of the range that a channel of the transform has once the mean key is
    taken out; a step is 1/15 or 1/255 of that range. 1e-5 for what rounding to float32 does to keys
    of about 10."""
    case = Case(11, bits, 64, held)
    at = case.given.context_slots
    true_keys, true_values = case.given.keys[at], case.given.values[at]
    keys, values = case.held()
    if bits == 16:
        assert torch.equal(keys, true_keys) and torch.equal(values, true_values)
        return
    cos, sin = case.cos[case.tokens], case.sin[case.tokens]
    some = torch.linspace(0, len(at) - 1, min(SAMPLE, len(at))).long()
    mean = unrotate(true_keys[some], cos[some], sin[some]).mean(0)
    without = true_keys - rotate(mean.expand(len(at), -1, -1), cos, sin)
    for rows in torch.arange(len(at)).split(GROUP_TOKENS):
        low, high = transformed(without[rows]).aminmax(dim=0)
        step = (high - low + 2.0**-10 * low.abs()) / (2**bits - 1) * 1.001
        error = transformed((keys - true_keys)[rows]).abs()
        assert bool((error <= step / 2 + 1e-5).all())
    span = true_values.amax(-1, keepdim=True) - true_values.amin(-1, keepdim=True)
    # scale and offset of values are half precision: 2^-10 of a value more
    assert bool(((values - true_values).abs() <= span / (2**bits - 1) / 2 * 1.01 + 0.004).all())


@pytest.mark.parametrize("bits", BITS)
def test_logits_are_the_products_with_the_keys_that_come_back(bits: int) -> None:
    """Computed from codes, with the mean's part apart; keys of hundreds, products of thousands."""
    case = Case(12, bits, 64)
    case.given.keys[..., 1] += 300
    case.cache.take(0, case.given)
    keys, _ = case.held()
    query = normal(13, HEADS, DIM)
    logits = case.cache._context[0]._logits(query)
    expected = torch.einsum("grd,tgd->grt", query.double().view(GROUPS, -1, DIM), keys.double())
    # float32 sums of eight products of up to 1000, rounded to 6e-8 of them each, several times
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=2e-3)


@pytest.mark.parametrize(("bits", "n_bytes"), [(4, 24), (8, 40), (16, 128)])
def test_bytes_are_those_of_the_entries_the_ranges_and_the_rest(bits: int, n_bytes: int) -> None:
    case = Case(2, bits, 64)
    n_groups = math.ceil(len(case.tokens) / GROUP_TOKENS)
    assert n_groups == 2
    ranges = n_groups * 2 * GROUPS * DIM * 2 if bits < 16 else 0
    rest = len(case.given.other_slots)
    row = 2 * GROUPS * DIM * 4
    expected = n_groups * GROUP_TOKENS * n_bytes + ranges + rest * row
    assert case.cache.kv_bytes == case.cache.prompt_bytes == expected
    one = torch.ones(1, GROUPS, 1, DIM)
    case.cache.attend(0, torch.ones(1, HEADS, 1, DIM), one, one, SCALING)
    assert case.cache.kv_bytes == expected + row and case.cache.prompt_bytes == expected
    assert case.cache.room == 0


def test_a_step_counts_as_attending_to_its_budget_or_to_less() -> None:
    assert [Case(0, 4, 64).cache.attended(n) for n in (0, 63, 64, 100)] == [0, 63, 64, 64]


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
    """KL(p || q) of rows of logits, mean over rows, in nats."""
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


def logits_of(bits: int, eviction: Quest | str, strength: float = 1.0) -> Tensor:
    """Of the first token, and after each of eight more that see the whole context."""
    engine = Engine(biased_model(strength), block_size=8, store_bits=bits)
    for chunk in CHUNKS:
        engine.cache_chunk(chunk)
    return engine.logits(PROMPT, CHUNKS, follow=FOLLOW, method="reuse", eviction=eviction)


@pytest.mark.parametrize("bits", [4, 8])
def test_keys_with_a_large_constant_a_channel_lose_nothing(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the first token, by the chunks' entries, nor eight after it, by the answer's own.

    The first one is as near to 16 bits as in the same model without these constants, within twice
    the error for another draw of rounding, which is four times the divergence. For later ones every
    entry is rounded twice instead of once (as it is in the dense cache), by steps of the same size,
    which doubles the divergence at most; and moves it less than the first rounding did. Where the
    constants are rotated before the range is taken, it is nowhere near.
    """
    everything = Quest(budget_ratio=1.0)
    exact, dense = logits_of(16, "none"), logits_of(bits, "none")
    plain = [logits_of(b, "none", strength=0.0)[:1] for b in (16, bits)]
    assert divergence(exact[:1], dense[:1]) < 4 * divergence(*plain)
    sparse, off = logits_of(bits, everything), divergence(exact[1:], dense[1:])
    assert torch.equal(sparse[0], dense[0]), "the first token never sees this cache"
    assert divergence(exact[1:], sparse[1:]) < 2 * off
    assert divergence(dense[1:], sparse[1:]) < off
    monkeypatch.setattr(sparse_cache, "unrotate", lambda x, cos, sin: torch.zeros_like(x))
    spoilt = logits_of(bits, everything)
    assert divergence(exact[1:], spoilt[1:]) > 5 * off


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("bits", [4, 8])
def test_room_for_all_is_no_eviction_within_half_a_step(family: str, bits: int) -> None:
    """Against the dense cache after the same pass: what differs is one rounding of each entry.

    Derived: noise, uniform within half a step of the rotated keys and of the values, is added to
    what the dense cache holds of the context, and moves the logits as far, within twice for another
    draw (of noise: equal keys at other positions are unequal here, so every entry has its own).
    """
    engine = Engine(tiny_model(family), block_size=8, store_bits=bits)
    engine.cache_chunks(CHUNKS)
    true = ask(engine, PROMPT, CHUNKS, "reuse").follow(FOLLOW)
    sparse = ask(engine, PROMPT, CHUNKS, "reuse", eviction=Quest(budget_ratio=1.0))
    by_noise = []
    for seed in range(4):
        asked = ask(engine, PROMPT, CHUNKS, "reuse")
        generator = torch.Generator().manual_seed(seed)
        at = asked.layout.context_positions
        with torch.inference_mode():
            for layer, held in enumerate(sparse.cache._context):
                step = held._range[held._group, 0].float()
                noise = torch.rand(step.shape, generator=generator) - 0.5
                asked.cache.keys[layer][at] += step * noise
                values = asked.cache.values[layer][at]
                span = values.amax(-1, keepdim=True) - values.amin(-1, keepdim=True)
                noise = torch.rand(values.shape, generator=generator) - 0.5
                asked.cache.values[layer][at] += span / (2**bits - 1) * noise
        by_noise.append(asked.follow(FOLLOW) - true)
    off = (sparse.follow(FOLLOW) - true).square().mean().sqrt()
    assert 0 < off < 2 * torch.stack(by_noise).square().mean().sqrt()
