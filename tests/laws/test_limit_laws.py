"""The limit laws: what every method must equal at the ends of its range, on every family.

Logits are compared in float32; 2e-4 is far below what a single wrong entry or position changes in
these models (their logits spread over tens) and above the rounding of another summation order.

Laws that compare stored entries with computed ones hold to that with 16 bits, which keep every bit.
With fewer, entries are within half a step (`test_few_bits.py`). Laws that compare two ways over the
same stored entries know no bits, and hold to 2e-4 with all of them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch

from samkv_integrations.engine import Engine
from samkv_integrations.methods import METHODS
from samkv_integrations.methods.base import Method, RecomputeNone, Select, SelectAll
from samkv_integrations.methods.baselines import RecomputeAll
from samkv_integrations.methods.eviction import EVICTIONS
from samkv_integrations.methods.guided import GuidedRecompute
from samkv_integrations.runtimes.transformers.entries.cache_arrays import key_range
from samkv_integrations.runtimes.transformers.eviction.base import SparseEviction
from samkv_integrations.runtimes.transformers.papers.ape import ApeAttention
from samkv_integrations.runtimes.transformers.papers.multi_infllm import MultiInfllmSelect
from samkv_integrations.runtimes.transformers.papers.samkv import SamkvSelect
from tests.support.asking import ask
from tests.support.chunks import cache_of
from tests.support.covering import covering
from tests.support.laws import (
    CHUNKS,
    FOLLOW,
    FROM_THE_START,
    PROMPT,
    TOLERANCE,
    WHOLE_IS_FASTER,
    WITH_BITS,
    assert_same_answer,
    changed,
    first_logits,
    mixed,
    plain_logits,
    shared_engine,
)
from tests.support.models import FAMILIES, tiny_model


def test_recompute_is_the_plain_forward(engine: Engine) -> None:
    logits, query = first_logits(engine, PROMPT, CHUNKS, "recompute")
    assert query.layout.n_chunks == len(CHUNKS)
    torch.testing.assert_close(logits, plain_logits(engine.model, query.layout), **TOLERANCE)
    assert float(logits.std()) > 1, "logits too flat to notice a mistake"


def test_recompute_continues_with_the_tokens_of_generate(engine: Engine) -> None:
    answer = engine.generate(PROMPT, CHUNKS, method="recompute", max_new_tokens=12)
    _, query = first_logits(engine, PROMPT, CHUNKS, "recompute")
    ids = query.layout.token_ids[None]
    with torch.inference_mode():
        out = engine.model.hf.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )
    assert answer.text == engine.model.detokenize(out[0, ids.shape[1] :].tolist())


def test_one_chunk_reused_after_its_prefix_is_prefix_caching(engine: Engine) -> None:
    prompt = CHUNKS[0] + "\n\nQuestion: why?"
    reused, query = first_logits(engine, prompt, CHUNKS[:1], "reuse")
    assert bool(query.layout.exact.all())
    torch.testing.assert_close(reused, plain_logits(engine.model, query.layout), **TOLERANCE)


def test_a_chunk_after_the_prefix_text_of_its_cache_is_exact(engine: Engine) -> None:
    system = "You answer briefly.\n\n"
    longer = Engine(engine.model, block_size=8, prefix_text=system, store_bits=16)
    assert longer.fingerprint.digest != engine.fingerprint.digest
    longer.cache_chunks(CHUNKS[:1])
    prompt = f"{system}{CHUNKS[0]}\n\nQuestion: why?"
    reused, query = first_logits(longer, prompt, CHUNKS[:1], "reuse")
    assert query.layout.exact.tolist() == [True]
    torch.testing.assert_close(reused, plain_logits(engine.model, query.layout), **TOLERANCE)
    _, other = first_logits(longer, CHUNKS[0] + " why?", CHUNKS[:1], "reuse")
    assert other.layout.exact.tolist() == [False]


def test_reuse_of_many_chunks_is_not_full_prefill(engine: Engine) -> None:
    """Otherwise the laws here could not fail."""
    reused, query = first_logits(engine, PROMPT, CHUNKS, "reuse")
    assert float((reused - plain_logits(engine.model, query.layout)).abs().max()) > 0.05
    local, _ = first_logits(engine, PROMPT, CHUNKS, "reuse-local")
    assert float((reused - local).abs().max()) > 0.05


class KeepAll(SamkvSelect):
    """SamKV's probe and inputs, every block kept."""

    def choose(self, scores, inputs, layout) -> torch.Tensor:
        return torch.ones_like(super().choose(scores, inputs, layout))


@pytest.mark.parametrize(
    ("name", "select"), [("samkv-overwrite", KeepAll()), ("samkv-guided", SelectAll())]
)
def test_keeping_and_recomputing_all_is_recompute(
    engine: Engine, name: str, select: Select
) -> None:
    method = replace(METHODS[name], select=select, recompute=RecomputeAll())
    logits, query = first_logits(engine, PROMPT, CHUNKS, method)
    torch.testing.assert_close(logits, plain_logits(engine.model, query.layout), **TOLERANCE)


def test_guided_recomputing_nothing_is_reuse(any_engine: Engine) -> None:
    for recompute in (RecomputeNone(), GuidedRecompute(first=0, matched=0)):
        method = replace(METHODS["samkv-guided"], recompute=recompute)
        guided, query = first_logits(any_engine, PROMPT, CHUNKS, method)
        assert query.report.kept_ratio == 1.0 and query.report.recompute_ratio == 0.0
        assert_same_answer(query, guided, *first_logits(any_engine, PROMPT, CHUNKS, "reuse"))


def test_guided_recomputing_all_is_recompute(any_engine: Engine) -> None:
    """At any number of bits: no stored entry is left."""
    for recompute in (RecomputeAll(), GuidedRecompute(first=10**6)):
        method = replace(METHODS["samkv-guided"], recompute=recompute)
        guided, query = first_logits(any_engine, PROMPT, CHUNKS, method)
        full = first_logits(any_engine, PROMPT, CHUNKS, "recompute")
        assert_same_answer(query, guided, *full)
        assert query.report.recompute_ratio == 1.0


ALL_OF_IT = [
    changed("epic", first=90),
    changed("cacheblend", ratio=1.0),
    changed("cacheblend", ratio=0.0, layer=3),  # no layer comes after it
    changed("a3", ratio=1.0),
    changed("a3", ratio=0.3, layer=9),
]


@pytest.mark.parametrize(
    ("any_engine", "method"), covering(WITH_BITS, ALL_OF_IT, times=3), indirect=["any_engine"]
)
def test_recomputing_every_token_is_recompute(any_engine: Engine, method: Method) -> None:
    # the first chunk is reused as it is where it is exact, and so as exactly as it was stored
    is_lossless = any_engine.fingerprint.store_bits == 16
    for prompt in (PROMPT, FROM_THE_START) if is_lossless else (PROMPT,):
        logits, query = first_logits(any_engine, prompt, CHUNKS, method)
        assert_same_answer(query, logits, *first_logits(any_engine, prompt, CHUNKS, "recompute"))
        exact = len(CHUNKS[0]) if query.layout.exact[0] else 0
        n_context = query.layout.n_context
        assert query.report.recompute_ratio == (n_context - exact) / n_context


NOTHING_OF_IT = [
    changed("epic", first=0),
    replace(METHODS["multi-infllm"], select=MultiInfllmSelect(max_kept_ratio=1.0)),
]


@pytest.mark.parametrize(
    ("any_engine", "method"), covering(WITH_BITS, NOTHING_OF_IT, times=2), indirect=["any_engine"]
)
def test_recomputing_nothing_of_everything_is_reuse(any_engine: Engine, method: Method) -> None:
    logits, query = first_logits(any_engine, PROMPT, CHUNKS, method)
    assert_same_answer(query, logits, *first_logits(any_engine, PROMPT, CHUNKS, "reuse"))
    assert query.report.recompute_ratio == 0.0


@pytest.mark.parametrize(
    ("engine", "name", "layer"),
    covering(FAMILIES, ["cacheblend", "a3"], [0, 1, 2], times=2),
    indirect=["engine"],
)
def test_a_share_of_nothing_recomputes_the_layers_of_the_check_alone(
    engine: Engine, name: str, layer: int
) -> None:
    logits, query = first_logits(engine, PROMPT, CHUNKS, changed(name, ratio=0.0, layer=layer))
    reused, of_reuse = first_logits(engine, PROMPT, CHUNKS, "reuse")
    full, of_full = first_logits(engine, PROMPT, CHUNKS, "recompute")
    context = query.layout.context_positions
    for n in range(engine.model.n_layers):
        expected = of_full if n <= layer else of_reuse
        for side in ("keys", "values"):
            mine, theirs = (getattr(q.cache, side)[n][context] for q in (query, expected))
            torch.testing.assert_close(mine, theirs, **TOLERANCE)
    assert query.report.recompute_ratio == (layer + 1) / engine.model.n_layers
    # neither end: the question has read what lower layers computed again and upper ones kept. Only
    # the keys and values of layer 0 are of a token by itself, the same however often they are made
    for other in (full, reused) if layer else (full,):
        assert float((logits - other).abs().max()) > 0.01


def test_ape_without_temperature_and_scale_is_reuse_local(any_engine: Engine) -> None:
    method = replace(METHODS["ape"], attend=ApeAttention(temperature=1.0, scale=1.0))
    logits, query = first_logits(any_engine, PROMPT, CHUNKS, method)
    local, of_local = first_logits(any_engine, PROMPT, CHUNKS, "reuse-local")
    assert_same_answer(query, logits, local, of_local)
    tokens = (70, 9, 201, 33, 8, 61)
    expected = of_local.follow(tokens)
    torch.testing.assert_close(query.follow(tokens), expected, **TOLERANCE)
    # every step weighs as the method says, not as the model does
    sharp, weigh = ask(any_engine, PROMPT, CHUNKS, method), ApeAttention.__call__
    with mock.patch.object(
        ApeAttention, "__call__", lambda _, *of_step: weigh(ApeAttention(temperature=0.5), *of_step)
    ):
        sharpened = sharp.follow(tokens)
    assert float((sharpened - expected).abs().amax(1).min()) > 0.05
    texts = [
        any_engine.generate(PROMPT, CHUNKS, method=m, max_new_tokens=8).text
        for m in (method, "reuse-local")
    ]
    assert texts[0] == texts[1]


FUSED = ["samkv-overwrite", "samkv-guided", "epic", "cacheblend", "a3", "recompute"]


@pytest.mark.parametrize(
    ("any_engine", "name"), covering(WITH_BITS, FUSED, times=2), indirect=["any_engine"]
)
def test_fusion_with_weight_one_is_overwrite(any_engine: Engine, name: str) -> None:
    method = METHODS[name]
    overwritten, of_overwrite = first_logits(any_engine, PROMPT, CHUNKS, method)
    assert of_overwrite.report.recompute_ratio > 0.1
    fused, query = first_logits(
        any_engine, PROMPT, CHUNKS, replace(method, update=partial(mixed, 1.0))
    )
    assert_same_answer(query, fused, overwritten, of_overwrite)


def test_fusion_with_weight_zero_is_reuse(any_engine: Engine) -> None:
    method = replace(METHODS["recompute"], update=partial(mixed, 0.0))
    unchanged, _ = first_logits(any_engine, PROMPT, CHUNKS, method)
    reused, _ = first_logits(any_engine, PROMPT, CHUNKS, "reuse")
    torch.testing.assert_close(unchanged, reused, **TOLERANCE)


def test_order_of_ingest_does_not_matter(engine: Engine) -> None:
    """Nor whether chunks are prefilled together or one by one."""
    other = Engine(engine.model, block_size=8, store_bits=16, prefix="bos", prefix_bytes=0)
    other.costs = WHOLE_IS_FASTER
    for chunk in reversed(CHUNKS):
        other.cache_chunks([chunk])
    for name in METHODS:
        one, of_one = first_logits(engine, PROMPT, CHUNKS, name)
        two, of_two = first_logits(other, PROMPT, CHUNKS, name)
        assert_same_answer(of_one, one, two, of_two)


@pytest.mark.parametrize("store_bits", [4, 8, 16])
def test_order_of_ingest_changes_no_bit(store_bits: int) -> None:
    """Chunk by chunk, so that no padding rounds a key across the border between two codes."""
    engines = [Engine(tiny_model("llama"), block_size=8, store_bits=store_bits) for _ in range(2)]
    for engine, chunks in zip(engines, (CHUNKS, CHUNKS[::-1]), strict=True):
        for chunk in chunks:
            engine.cache_chunks([chunk])
    one, two = ([cache_of(engine, chunk) for chunk in CHUNKS] for engine in engines)
    for mine, theirs in zip(one, two, strict=True):
        assert np.array_equal(mine.entries, theirs.entries)
        assert torch.equal(key_range(mine), key_range(theirs))
    follow = [70, 9, 201]
    mine, theirs = (e.logits(PROMPT, CHUNKS, follow=follow) for e in engines)
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("engine", "name"),
    covering(FAMILIES, [n for n in METHODS if n != "recompute"], times=2),
    indirect=["engine"],
)
def test_no_method_changes_an_exact_first_chunk(engine: Engine, name: str) -> None:
    """Entries of the first chunk that are kept at all must be those of full prefill."""
    _, query = first_logits(engine, FROM_THE_START, CHUNKS, name)
    _, full = first_logits(engine, FROM_THE_START, CHUNKS, "recompute")
    layout = query.layout
    assert layout.exact.tolist() == [True] + [False] * (len(CHUNKS) - 1)
    kept = query.kept[:, layout.block_of_token] & (layout.chunk_of_token == 0)
    assert kept.any()
    for layer in range(engine.model.n_layers):
        first = layout.context_positions[kept[layer]]
        before = int(layout.uncached[: len(engine.prefix)].sum())
        rows = slice(before, before + len(first))
        for mine, exact in (
            (query.cache.keys, full.cache.keys),
            (query.cache.values, full.cache.values),
        ):
            torch.testing.assert_close(mine[layer][rows], exact[layer][first], **TOLERANCE)
    # and none of them is computed again
    of_first = layout.chunk_of_token == 0
    assert not bool(query.recomputed[:, of_first].any())


@pytest.mark.parametrize(
    ("engine", "name"), covering(FAMILIES, list(METHODS), times=2), indirect=["engine"]
)
def test_a_prompt_of_one_exact_chunk_reads_and_computes_no_more_than_reuse(
    engine: Engine, name: str
) -> None:
    """There is nothing to decide about: a check of nothing, a share of nothing.

    But for `recompute`, which computes everything, and reads the token ids alone.
    """
    prompt = CHUNKS[0] + "\n\nQuestion: why?"
    _, reuse = first_logits(engine, prompt, CHUNKS[:1], "reuse")
    logits, query = first_logits(engine, prompt, CHUNKS[:1], name)
    assert bool(logits.isfinite().all())
    keeps_all = METHODS[name].select.keeps_all
    if keeps_all and METHODS[name].attend is None:
        plain = plain_logits(engine.model, query.layout)
        torch.testing.assert_close(logits, plain, **TOLERANCE)
    if name == "recompute":
        assert query.report.bytes_read == 4 * query.layout.n_context
        return
    assert query.report.recompute_ratio == 0.0
    assert [int(each.plan.computed.sum()) for each in query.planned] == [0] * len(query.planned)
    if keeps_all:
        assert query.report.bytes_read == reuse.report.bytes_read
    else:  # some blocks, and what they are chosen by
        assert query.report.bytes_read < reuse.report.bytes_read


SPARSE = {n: rule for n, rule in EVICTIONS.items() if isinstance(rule, SparseEviction)}


def with_few(name: str) -> SparseEviction:
    """The rule with the fewest context tokens for a step, which are fewer than there are."""
    rule = SPARSE[name]
    assert rule.min_tokens < sum(map(len, CHUNKS))
    return replace(rule, budget_ratio=None, budget_tokens=rule.min_tokens)


@pytest.mark.parametrize(
    ("engine", "method", "budget", "name"),
    covering(
        FAMILIES,
        ["reuse", "recompute", "samkv-guided", "samkv-fusion", "ape"],
        [(1.0, None), (None, 5000)],
        list(SPARSE),
        times=2,
    ),
    indirect=["engine"],
)
def test_a_step_with_room_for_all_is_no_eviction(
    engine: Engine, method: str, budget: tuple[float | None, int | None], name: str
) -> None:
    """With 16 bits nothing is rounded but sums in another order."""
    rule = replace(SPARSE[name], budget_ratio=budget[0], budget_tokens=budget[1])
    dense = ask(engine, PROMPT, CHUNKS, method, eviction="none")
    sparse = ask(engine, PROMPT, CHUNKS, method, eviction=rule)
    assert torch.equal(sparse.first.logits, dense.first.logits)
    assert sparse.report.kept_ratio == dense.report.kept_ratio
    torch.testing.assert_close(sparse.follow(FOLLOW), dense.follow(FOLLOW), **TOLERANCE)


@pytest.mark.parametrize(("method", "name"), covering(list(METHODS), list(SPARSE), times=2))
def test_the_first_token_has_seen_all_that_a_step_may_not(method: str, name: str) -> None:
    """A budget of the answer never touches the prompt's own pass."""
    engine = shared_engine("llama", 4)
    few = ask(engine, PROMPT, CHUNKS, method, eviction=with_few(name))
    dense = ask(engine, PROMPT, CHUNKS, method, eviction="none")
    assert torch.equal(few.first.logits, dense.first.logits)
    assert few.report.recompute_ratio == dense.report.recompute_ratio


@pytest.mark.parametrize(
    ("engine", "name"), covering(FAMILIES, list(SPARSE), times=2), indirect=["engine"]
)
def test_a_step_with_little_room_is_not_no_eviction(engine: Engine, name: str) -> None:
    """Otherwise the laws of these rules could not fail."""
    dense = ask(engine, PROMPT, CHUNKS, "reuse", eviction="none").follow(FOLLOW)
    few = ask(engine, PROMPT, CHUNKS, "reuse", eviction=with_few(name))
    assert few.report.kept_ratio < 1
    assert float((few.follow(FOLLOW) - dense).abs().amax(1).min()) > 0.01
