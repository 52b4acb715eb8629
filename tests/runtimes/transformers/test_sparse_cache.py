"""The cache whose context is in few bits: what a step attends to, and what the bits cost."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from threading import Thread

import pytest
import torch
from torch import Tensor

from samkv_integrations.engine import Engine
from samkv_integrations.runtimes.transformers.entries.quantise import Entries, EntryFormat, groups
from samkv_integrations.runtimes.transformers.eviction import Quest
from samkv_integrations.runtimes.transformers.passes.working_cache import (
    ContextSlots,
    LayerEntries,
    SparseCache,
)
from samkv_integrations.runtimes.transformers.runtime import Model
from tests.support.asking import ask
from tests.support.chunks import encoded
from tests.support.laws import CHUNKS, FOLLOW, PROMPT
from tests.support.models import byte_tokenizer, hf_model, tiny_model
from tests.support.tensors import normal

GROUPS, HEADS, DIM, SCALING = 2, 6, 8, 0.4
CONTEXT = 100


@dataclass
class Stored:
    """A context as a request has read it."""

    all: Entries

    def entries(self, layer: int, tokens: Tensor) -> Entries:
        return self.all.select(tokens)


def context_alone(form: EntryFormat, keys: Tensor, values: Tensor) -> tuple[SparseCache, Entries]:
    """A cache of a context at no positions, and its entries; a step attends to 64 of them."""
    n = len(keys)
    codes, key_range = encoded(form, keys, values)
    nowhere = torch.ones(n, GROUPS, DIM // 2)
    entries = Entries(
        form=form, codes=codes, key_range=key_range, group=groups(n, codes.device),
        cos=nowhere, sin=torch.zeros_like(nowhere),
    )  # fmt: skip
    at, (decoded, of_values) = torch.arange(n), entries.keys_and_values()
    cache = SparseCache(1, Stored(entries), Quest(budget_tokens=64), 64, 1)
    cache.take(
        0,
        LayerEntries(
            keys=decoded, values=of_values, n_entries=n,
            is_context=torch.ones(n, dtype=torch.bool),
            context=ContextSlots(tokens=at, slots=at, changed=at[:0], other_slots=at[:0]),
            queries=torch.empty(HEADS, 0, DIM),
            query_slots=at[:0], scaling=SCALING,
        ),
    )  # fmt: skip
    return cache, entries


@pytest.mark.parametrize(
    ("dtype", "bits", "height", "tolerance"),
    [
        (torch.float32, 16, 1.0, 1e-5),
        (torch.float32, 4, 1.0, 1e-5),
        # numbers near 1000 are 4 apart, and biases of queries and keys go that far; the relative
        # error of weights and of the output is 2^-8
        (torch.bfloat16, 16, 60.0, 0.02),
        (torch.bfloat16, 16, 1000.0, 0.02),
    ],
)
def test_a_step_attends_to_the_tokens_of_the_largest_summed_softmax_and_to_the_rest_as_one(
    dtype: torch.dtype, bits: int, height: float, tolerance: float
) -> None:
    """Against double precision on the same keys and values, at logits of up to ``height``.

    The softmax is summed over all heads; the rest has its own weight, and the mean value.
    """
    form = EntryFormat(bits=bits, n_kv_heads=GROUPS, head_dim=DIM, dtype=dtype)
    keys, values = normal(0, CONTEXT, GROUPS, DIM), normal(1, CONTEXT, GROUPS, DIM)
    keys[..., 0] = 8
    cache, entries = context_alone(form, keys.to(dtype), values.to(dtype))
    query = normal(2, HEADS, DIM)
    query[:, 0] = height / 8 / SCALING
    query = query.to(dtype)
    key, value = keys[:1].to(dtype), values[:1].to(dtype)
    output = cache.attend(
        0, query[None, :, None], key[0][None, :, None], value[0][None, :, None], SCALING
    )
    decoded, of_values = entries.keys_and_values()
    held = torch.cat((decoded, key)).double()
    grouped = query.double().view(GROUPS, -1, DIM)
    logits = torch.einsum("grd,tgd->grt", grouped, held) * SCALING
    best = logits[..., :-1].softmax(-1).sum((0, 1)).topk(64).indices
    by_value = of_values.double().mean(0, keepdim=True).repeat(CONTEXT + 1, 1, 1)
    by_value[best], by_value[-1] = of_values.double()[best], value[0].double()
    expected = torch.einsum("grt,tgd->grd", logits.softmax(-1), by_value).flatten(0, 1)
    torch.testing.assert_close(output[0, :, 0].double(), expected, rtol=tolerance, atol=tolerance)


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
        assert engine.scheduler.run(lambda _: torch.get_num_threads()) == 3
    finally:
        torch.set_num_threads(before)
    assert (set(seen), set(of_others)) == ({1}, {3})
    alone = engine.logits(PROMPT, method="reuse", eviction="quest", follow=FOLLOW)
    torch.testing.assert_close(with_three, alone, rtol=0, atol=1e-4)
