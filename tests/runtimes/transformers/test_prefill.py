"""Ingest against transformers' own prefill: what is stored must be what the model computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from samkv_integrations.engine import Engine
from samkv_integrations.runtimes.transformers.entries.attention_stats import (
    decode_means,
    mean_of_blocks,
)
from samkv_integrations.runtimes.transformers.entries.cache_arrays import (
    block_means,
    local_query,
    statistics,
)
from samkv_integrations.runtimes.transformers.entries.quantise import rotate
from samkv_integrations.runtimes.transformers.passes.prefill import (
    PrefilledChunks,
    entries_before,
    prefill,
)
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.store.chunk import ChunkCache, ChunkRef, Fingerprint
from tests.support.chunks import decoded
from tests.support.covering import covering
from tests.support.models import FAMILIES, tiny_model

BLOCK = 8
ANCHORS = 3 * BLOCK  # one initial and two local blocks
LENGTHS = (1, 2, BLOCK, 2 * BLOCK + 3, ANCHORS - 1, ANCHORS, ANCHORS + 1, 61)

# Entries are sums of 64 float32 products, of up to 8 in all. Attention is summed in another order
# than that of transformers, and un-rotating and rotating keys rounds twice (6e-8 of 8). Another
# number of tokens, or a prefix, which has a pass of its own, changes the order of summation in
# every layer, so there a hundred roundings may add up. What a wrong entry, position or mask changes
# is in the tenths.
CLOSE = {"rtol": 2e-6, "atol": 2e-5}
BATCHED = {"rtol": 1e-4, "atol": 1e-4}


def new_chunk(n_tokens: int, seed: int = 0) -> ChunkRef:
    generator = torch.Generator().manual_seed(1000 * n_tokens + seed)
    ids = tuple(torch.randint(6, 262, (n_tokens,), generator=generator).tolist())
    return ChunkRef(key=f"{n_tokens}-{seed}", text="text", token_ids=ids)


def fingerprint_of(model: Model, bits: int) -> Fingerprint:
    return replace(Engine(model, block_size=BLOCK).fingerprint, store_bits=bits)


def caches_of(model: Model, chunks: Sequence[ChunkRef], prefix: tuple[int, ...]) -> PrefilledChunks:
    """With 16 bits: what was captured, to the bit."""
    with torch.inference_mode():
        before = entries_before(model, prefix)
        return prefill(model, chunks, fingerprint_of(model, 16), before)


@dataclass(frozen=True)
class Own:
    """What transformers computes for prefix and chunk by itself, tokens of the chunk alone.

    keys: (L, T, G, D) rotated, from its cache; values the same; queries: (L, T, H, D) before RoPE,
    as they leave the last module before it.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor


def own(model: Model, ids: tuple[int, ...], prefix: tuple[int, ...]) -> Own:
    queries: list[Tensor] = []

    def note(module: Any, args: Any, output: Tensor) -> None:
        queries.append(output.view(-1, model.n_heads, model.head_dim)[len(prefix) :])

    last = [getattr(b.self_attn, "q_norm", b.self_attn.q_proj) for b in model.hf.model.layers]
    hooks = [module.register_forward_hook(note) for module in last]
    try:
        with torch.inference_mode():
            out = model.hf(torch.tensor([prefix + ids]), use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    layers = out.past_key_values.layers
    return Own(
        keys=torch.stack([layer.keys[0].transpose(0, 1)[len(prefix) :] for layer in layers]),
        values=torch.stack([layer.values[0].transpose(0, 1)[len(prefix) :] for layer in layers]),
        queries=torch.stack(queries),
    )


def assert_caches_equal(one: ChunkCache, other: ChunkCache) -> None:
    for found, expected in zip(decoded(one), decoded(other), strict=True):
        torch.testing.assert_close(found, expected, **BATCHED)
    torch.testing.assert_close(local_query(one), local_query(other), **BATCHED)
    assert one.token_ids.tolist() == other.token_ids.tolist()
    for name in ("block_max", "block_min", "outliers", "stable"):
        assert torch.equal(getattr(statistics(one), name), getattr(statistics(other), name)), name


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("part", ["layer", "self_attn", "self_attn.o_proj"])
def test_a_hook_in_the_last_layer_sees_what_it_sees_in_transformers(family: str, part: str) -> None:
    model, chunk, prefix = tiny_model(family), new_chunk(40), (1, 50, 60)
    layer = model.hf.model.layers[-1]
    seen: list[Tensor] = []
    hooked = layer if part == "layer" else layer.get_submodule(part)
    hook = hooked.register_forward_hook(
        lambda module, given, output: seen.append(output if part != "self_attn" else output[0])
    )
    try:
        caches_of(model, [chunk], prefix)
        with torch.inference_mode():
            model.hf(torch.tensor([prefix + chunk.token_ids]))
    finally:
        hook.remove()
    of_prefix, of_chunk, expected = seen
    torch.testing.assert_close(torch.cat((of_prefix, of_chunk), 1), expected, **BATCHED)


@pytest.mark.parametrize(("family", "prefix"), covering(FAMILIES, [(), (1,), (1, 50, 60)], times=2))
def test_captured_entries_are_those_of_transformers_own_cache(
    family: str, prefix: tuple[int, ...]
) -> None:
    model = tiny_model(family)
    for n_tokens in LENGTHS:
        chunk = new_chunk(n_tokens)
        (cached,) = caches_of(model, [chunk], prefix)
        expected = own(model, chunk.token_ids, prefix)
        shape = (model.n_layers, n_tokens, model.n_kv_heads, model.head_dim)
        keys, values = decoded(cached)
        assert keys.shape == values.shape == shape
        assert cached.token_ids.tolist() == list(chunk.token_ids)
        assert (cached.key, cached.text) == (chunk.key, chunk.text)
        where = torch.arange(len(prefix), len(prefix) + n_tokens)
        cos, sin = model.hf.model.rotary_emb(torch.empty(0), where[None])
        close = BATCHED if prefix else CLOSE
        torch.testing.assert_close(rotate(keys, cos[0], sin[0]), expected.keys, **close)
        torch.testing.assert_close(values, expected.values, **close)
        middle, stored = cached.blocks.middle_blocks, block_means(cached)
        lengths = torch.from_numpy(cached.blocks.lengths)
        means = mean_of_blocks(keys, lengths)[:, list(middle)]
        off = (decode_means(stored) - means).abs()
        assert (off <= stored.scale.float()[..., None] / 2 + 1e-5).all(), "8 bits"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_local_query_is_the_mean_of_the_local_blocks_queries_before_rope(family: str) -> None:
    model, prefix = tiny_model(family), (1,)
    for n_tokens in LENGTHS:
        chunk = new_chunk(n_tokens)
        (cached,) = caches_of(model, [chunk], prefix)
        n_blocks = math.ceil(n_tokens / BLOCK)
        local = range(max(0, n_blocks - 2) * BLOCK, n_tokens)
        queries = own(model, chunk.token_ids, prefix).queries
        expected = sum(queries[:, t] for t in local) / len(local)
        assert local_query(cached).shape == (model.n_layers, model.n_heads, model.head_dim)
        torch.testing.assert_close(local_query(cached), expected, **BATCHED)


@pytest.mark.parametrize(("family", "prefix"), covering(FAMILIES, [(), (1,)]))
def test_a_batch_of_different_lengths_equals_one_by_one(
    family: str, prefix: tuple[int, ...]
) -> None:
    model = tiny_model(family)
    chunks = [new_chunk(n, seed) for seed, n in enumerate((61, 1, ANCHORS, 40, 61, 7))]
    together = caches_of(model, chunks, prefix)
    for chunk, cached in zip(chunks, together, strict=True):
        (alone,) = caches_of(model, [chunk], prefix)
        assert cached.key == chunk.key
        assert_caches_equal(cached, alone)


def test_a_chunk_sees_its_prefix_and_itself_alone() -> None:
    model = tiny_model("llama")
    first, second = new_chunk(40, 1), new_chunk(40, 2)
    (alone,) = caches_of(model, [first], (1,))
    beside, _ = caches_of(model, [first, second], (1,))
    assert_caches_equal(alone, beside)
    (bare,) = caches_of(model, [first], ())
    (bare_keys, bare_values), (keys, values) = decoded(bare), decoded(alone)
    assert float((bare_values[1:] - values[1:]).abs().max()) > 0.1, "the prefix is seen"
    torch.testing.assert_close(bare_keys[0], keys[0], **CLOSE)  # position-free


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns while the mode is on."""

    n_elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = (x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))
        self.n_elements = max(self.n_elements, *sizes, 0)
        return out


def test_prefill_never_holds_an_attention_matrix() -> None:
    """Of a chunk of T tokens no tensor of H x T x T, in no layer: the largest are its entries, or
    a tile of H x 64 x T, or distances of 256 x (T + 256)."""
    model, n_tokens = tiny_model("llama"), 1536
    with torch.inference_mode(), Largest() as largest:
        before = entries_before(model, (1,))
        prefill(model, [new_chunk(n_tokens)], fingerprint_of(model, bits=4), before)
    tile = model.n_heads * 64 * (n_tokens + 1)
    entries = model.n_layers * n_tokens * model.n_kv_heads * model.head_dim
    most = max(tile, entries, 256 * (n_tokens + 256))
    assert largest.n_elements <= most < model.n_heads * n_tokens * n_tokens / 2
