"""The methods of other papers: each one's choice against a slow version that says what it does.

Where a choice depends on what the model computed, the slow version takes it from the plain forward
of transformers, by hooks, and rotates and sums by itself.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from samkv_integrations.cache.chunk import BlockScheme
from samkv_integrations.cache.windows import MIN_RUN
from samkv_integrations.engine.engine import Engine
from samkv_integrations.errors import InvalidOption
from samkv_integrations.eviction import EVICTIONS
from samkv_integrations.methods import DEFAULT_METHOD, METHODS, Method
from samkv_integrations.methods.a3 import A3Recompute
from samkv_integrations.methods.ape import ApeAttention
from samkv_integrations.methods.base import (
    Checked,
    RecomputeNone,
    SelectAll,
    Selection,
    SelectionInputs,
    overwrite,
)
from samkv_integrations.methods.baselines import RecomputeAll
from samkv_integrations.methods.cacheblend import CacheblendRecompute
from samkv_integrations.methods.epic import EpicRecompute
from samkv_integrations.methods.guided import GuidedRecompute
from samkv_integrations.methods.multi_infllm import MultiInfllmSelect
from samkv_integrations.methods.samkv import Fusion, SamkvRecompute, SamkvSelect
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.layout import ChunkPart, Layout
from tests.support.chunks import cache_of, decoded
from tests.support.covering import covering
from tests.support.laws import CHUNKS, FROM_THE_START, PROMPT, changed, first_logits
from tests.support.models import FAMILIES, tiny_model, turned
from tests.support.selection_inputs import Request, Shape, request_of, shapes

MANY = settings(max_examples=100, deadline=None)
Vector = list[float]


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def sets(mask: Tensor) -> list[set[int]]:
    return [set(row.nonzero()[:, 0].tolist()) for row in mask]


@cache
def engine_of(family: str) -> Engine:
    engine = Engine(tiny_model(family), block_size=8, store_bits=16, prefix="bos")
    engine.cache_chunks(CHUNKS)
    return engine


# --- what the model makes of a prompt ----------------------------------------------------------


def projected(model: Model, layer: int, ids: Tensor) -> dict[str, Tensor]:
    """(T, heads, D) query, key (both before RoPE) and value of a layer, in transformers' own pass
    over ``ids``."""
    attn = model.hf.model.layers[layer].self_attn
    heads = {"q": model.n_heads, "k": model.n_kv_heads, "v": model.n_kv_heads}
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: object, inputs: object, output: Tensor) -> None:
            found[name] = output.reshape(len(ids), heads[name], model.head_dim)

        return hook

    hooks = []
    for name in heads:
        of_head = getattr(attn, f"{name}_norm", None)
        module = getattr(attn, f"{name}_proj") if of_head is None else of_head
        hooks.append(module.register_forward_hook(keep(name)))
    with torch.inference_mode():
        model.hf(ids[None])
    for hook in hooks:
        hook.remove()
    return found


def cached_entries(engine: Engine, layout: Layout, texts: list[str]) -> tuple[Tensor, Tensor]:
    """(L, Tctx, G, D) un-rotated keys, and values, as the chunk caches hold them."""
    caches = [cache_of(engine, text) for text in texts]
    keys, values = (torch.cat(side, dim=1) for side in zip(*map(decoded, caches), strict=True))
    assert keys.shape[1] == layout.n_context
    return keys, values


def not_exact(layout: Layout) -> list[int]:
    """Context tokens that may be computed again."""
    return [
        t for t, chunk in enumerate(layout.chunk_of_token.tolist()) if not bool(layout.exact[chunk])
    ]


def best(scores: dict[int, float], count: int) -> set[int]:
    return set(sorted(scores, key=lambda t: -scores[t])[:count])


PROMPTS = {"after a text": PROMPT, "exact first chunk": FROM_THE_START}


# --- CacheBlend --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "layer", "prompt"), covering(FAMILIES, [1, 2], list(PROMPTS), times=2)
)
def test_cacheblend_computes_where_values_deviate_most(
    family: str, layer: int, prompt: str
) -> None:
    """What layers up to the check see is full prefill, so its values are those of transformers."""
    engine = engine_of(family)
    _, query = first_logits(engine, PROMPTS[prompt], CHUNKS, changed("cacheblend", layer=layer))
    layout = query.layout
    values = projected(engine.model, layer, layout.token_ids)["v"]
    _, cached = cached_entries(engine, layout, CHUNKS)
    deviation = {}
    for t in not_exact(layout):
        new = values[int(layout.context_positions[t])].flatten().tolist()
        old = cached[layer, t].flatten().tolist()
        deviation[t] = sum((a - b) ** 2 for a, b in zip(new, old, strict=True))
    count = math.ceil(0.15 * layout.n_context)
    up_to, after = set(not_exact(layout)), best(deviation, count)
    assert len(after) == count < len(up_to)
    n_layers = engine.model.n_layers
    expected = [up_to if n <= layer else after for n in range(n_layers)]
    assert sets(query.recomputed) == expected
    assert query.report.recompute_ratio == pytest.approx(
        sum(map(len, expected)) / n_layers / layout.n_context
    )
    assert query.report.kept_ratio == 1.0


# --- A3 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "layer", "prompt"), covering(FAMILIES, [0, 1, 2], list(PROMPTS), times=2)
)
def test_a3_computes_what_the_question_attends_to(family: str, layer: int, prompt: str) -> None:
    """By a softmax over the context that may be computed again, head by head and token by token."""
    engine = engine_of(family)
    model = engine.model
    _, query = first_logits(engine, PROMPTS[prompt], CHUNKS, changed("a3", layer=layer))
    layout = query.layout
    made = projected(model, layer, layout.token_ids)
    n_question = len(PROMPTS[prompt]) - PROMPTS[prompt].index("\n\nQuestion")
    tokens = not_exact(layout)
    places = layout.context_positions.tolist()
    keys = {t: turned(made["k"][places[t]], places[t], model).tolist() for t in tokens}
    attention = dict.fromkeys(tokens, 0.0)
    for row in range(layout.n_tokens - n_question, layout.n_tokens):
        asking = turned(made["q"][row], row, model).tolist()
        for h, head in enumerate(asking):
            group = h * model.n_kv_heads // model.n_heads
            logits = [dot(head, keys[t][group]) / math.sqrt(model.head_dim) for t in tokens]
            top = max(logits)
            weights = [math.exp(x - top) for x in logits]
            for t, weight in zip(tokens, weights, strict=True):
                attention[t] += weight / sum(weights)
    count = math.ceil(0.15 * layout.n_context)
    expected = [
        set(tokens) if n <= layer else best(attention, count) for n in range(model.n_layers)
    ]
    assert sets(query.recomputed) == expected
    assert query.report.recompute_ratio == pytest.approx(
        sum(map(len, expected)) / model.n_layers / layout.n_context
    )


# --- both, on numbers of any kind --------------------------------------------------------------


def layout_of(lengths: tuple[int, ...], *, before: int = 0, size: int = 4) -> Layout:
    scheme = BlockScheme(size=size)
    ids, chunks = [1] * (1 + before), []
    for n in lengths:
        chunks.append(ChunkPart.whole(scheme.of(n), len(ids)))
        ids += [9] * n
    return Layout.of([*ids, 5, 5], chunks, (1,))


def checked_of(seed: int, tokens: list[int], *, groups: int = 2, heads: int = 2) -> Checked:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).float()

    n, dim = len(tokens), 4
    cached = normal(n, groups, dim), normal(n, groups, dim)
    return Checked(
        tokens=torch.tensor(tokens, dtype=torch.long),
        queries=normal(groups * heads, 3, dim),
        keys=normal(n, groups, dim),
        values=normal(n, groups, dim),
        scaling=0.4,
        cached=lambda: cached,
    )


@MANY
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(1, 20), min_size=1, max_size=4).map(tuple),
    st.integers(0, 1),
    st.floats(0, 1),
    st.sampled_from([CacheblendRecompute, A3Recompute]),
)
def test_a_share_of_the_context_is_pointed_out(
    seed: int, lengths: tuple[int, ...], before: int, ratio: float, part: type
) -> None:
    layout = layout_of(lengths, before=before)
    tokens = not_exact(layout)
    checked = checked_of(seed, tokens)
    rows = part(ratio=ratio).choose_after(checked, layout)
    assert rows.dtype == torch.bool and rows.shape == (sum(lengths),)
    assert rows.device.type == "cpu"
    scores: dict[int, float] = dict.fromkeys(tokens, 0.0)
    if part is CacheblendRecompute:
        _, cached = checked.cached()
        for i, t in enumerate(tokens):
            pairs = zip(
                checked.values[i].flatten().tolist(), cached[i].flatten().tolist(), strict=True
            )
            scores[t] = sum((a - b) ** 2 for a, b in pairs)
    elif tokens:
        for h in range(4):
            for row in range(3):
                asking = checked.queries[h, row].tolist()
                logits = [
                    0.4 * dot(asking, checked.keys[i, h // 2].tolist()) for i in range(len(tokens))
                ]
                total = sum(map(math.exp, logits))
                for t, x in zip(tokens, logits, strict=True):
                    scores[t] += math.exp(x) / total
    ranked = sorted(scores.values())
    gaps = [b - a for a, b in zip(ranked, ranked[1:], strict=False)]
    assume(not gaps or min(gaps) > 1e-5 * ranked[-1])  # nearer than float32 tells apart
    count = min(len(tokens), math.ceil(ratio * sum(lengths) - 1e-6))
    assert sets(rows[None]) == [best(scores, count)]


@pytest.mark.parametrize("part", [CacheblendRecompute, A3Recompute])
def test_tokens_before_the_check_are_all_that_are_not_exact(part: type) -> None:
    layout = layout_of((10, 7))
    keep = torch.ones(4, layout.n_blocks, dtype=torch.bool)
    keep[0, -1] = False  # the last block: tokens 14 to 16
    rows = part(layer=2).choose(Selection(keep=keep), SelectionInputs(n_layers=4), layout)
    second = set(range(10, 17))
    assert sets(rows) == [second - {14, 15, 16}, second, second, set()]
    assert part(layer=2).check_layer == 2 and part().check_layer == 1


# --- EPIC --------------------------------------------------------------------------------------


def slow_epic(layout: Layout, lengths: tuple[int, ...], part: EpicRecompute) -> set[int]:
    rows, start = set(), 0
    for chunk, length in enumerate(lengths):
        own = list(range(start, start + length))
        if part.ratio is None:
            wanted = own[: part.first] + (own[-part.last :] if part.last else [])
        else:
            wanted = own[: math.ceil(part.ratio * length)]
        if not bool(layout.exact[chunk]):
            rows |= set(wanted)
        start += length
    return rows


@MANY
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5).map(tuple),
    st.integers(0, 1),
    st.integers(0, 45),
    st.integers(0, 45),
    st.one_of(st.none(), st.sampled_from([0.0, 0.125, 0.25, 0.5, 0.75, 1.0])),
)
def test_epic_takes_the_ends_of_chunks(
    lengths: tuple[int, ...], before: int, first: int, last: int, ratio: float | None
) -> None:
    layout = layout_of(lengths, before=before)
    part = EpicRecompute(first=first, last=last, ratio=ratio)
    keep = torch.ones(3, layout.n_blocks, dtype=torch.bool)
    rows = part.choose(Selection(keep=keep), SelectionInputs(n_layers=3), layout)
    assert rows.dtype == torch.bool
    assert sets(rows) == [slow_epic(layout, lengths, part)] * 3
    assert part.check_layer is None and part.needs == frozenset()


@MANY
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5).map(tuple),
    st.integers(0, 45),
    st.integers(0, 45),
    st.one_of(st.none(), st.sampled_from([0.0, 0.125, 0.25, 0.5, 0.75, 1.0])),
)
def test_auto_weighs_no_less_than_what_epic_recomputes(
    lengths: tuple[int, ...], first: int, last: int, ratio: float | None
) -> None:
    """With a ratio, less than a token of each chunk more, which is rounded up."""
    layout = layout_of(lengths, before=1)
    part = EpicRecompute(first=first, last=last, ratio=ratio)
    keep = torch.ones(1, layout.n_blocks, dtype=torch.bool)
    computed = int(part.choose(Selection(keep=keep), SelectionInputs(n_layers=1), layout).sum())
    weighed = part.most_ratio(layout.n_context, len(lengths))
    assert 0 <= weighed <= 1
    rounding = len(lengths) if ratio is not None else 1e-6
    assert computed <= weighed * layout.n_context + rounding
    if ratio is None and min(lengths) >= first + last:
        assert computed == pytest.approx(weighed * layout.n_context)


def test_the_default_is_epic_or_full_prefill_where_that_is_faster() -> None:
    auto = METHODS[DEFAULT_METHOD]
    assert auto.recompute == EpicRecompute(first=16, last=0, ratio=None)
    assert (auto.else_way, auto.whole_if_faster, auto.recompute.whole_tokens) == ("epic", True, 0)
    same = {"name": "epic", "summary": METHODS["epic"].summary}
    assert replace(auto, **same, else_way="", whole_if_faster=False) == METHODS["epic"]


def test_epic_by_hand() -> None:
    """The first chunk is exact here; of the second, six tokens long, ends may meet."""
    layout = layout_of((5, 6, 20))
    keep = torch.ones(1, layout.n_blocks, dtype=torch.bool)

    def rows(**options: Any) -> set[int]:
        found = EpicRecompute(**options).choose(
            Selection(keep=keep), SelectionInputs(n_layers=1), layout
        )
        return sets(found)[0]

    assert rows(first=2) == {5, 6, 11, 12}
    assert rows(first=2, last=1) == {5, 6, 10, 11, 12, 30}
    assert rows(first=4, last=4) == {*range(5, 11), *range(11, 15), *range(27, 31)}
    assert rows(ratio=0.25) == {5, 6, *range(11, 16)}
    keep[0, 2] = False  # tokens 5 to 8
    assert rows(first=5) == {9, *range(11, 16)}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_epic_reports_what_it_computes(prompt: str) -> None:
    engine, exact = engine_of("llama"), prompt != "after a text"
    for first, last in ((16, 0), (3, 2), (0, 5)):
        method = changed("epic", first=first, last=last)
        _, query = first_logits(engine, PROMPTS[prompt], CHUNKS, method)
        count = sum(min(len(t), first + last) for t in CHUNKS[int(exact) :])
        report = query.report
        assert report.recompute_ratio == pytest.approx(count / query.layout.n_context)
        assert report.kept_ratio == 1.0 and report.probe_s == 0.0


# --- InfLLM for many contexts ------------------------------------------------------------------


def slow_infllm(request: Request, ratio: float) -> list[set[int]]:
    """Each chunk's anchors, and its best middle blocks until the first that does not fit."""
    shape = request.shape
    keep = []
    for layer in range(shape.n_layers):
        mean_query = request.mean_query[layer].tolist()
        means = request.inputs.block_means[layer].tolist()
        kept = {b.index for b in request.blocks if b.anchor}
        for chunk, tokens in enumerate(request.held):
            room = ratio * len(tokens)
            room -= sum(b.stop - b.start for b in request.blocks if b.chunk == chunk and b.anchor)
            scores = {
                # summed over heads, where a head that shares keys counts by its share
                b.index: sum(
                    dot(head, means[b.index][h // shape.heads]) / shape.heads
                    for h, head in enumerate(mean_query)
                )
                for b in request.middle(chunk)
            }
            for index in sorted(scores, key=lambda i: -scores[i]):
                room -= request.blocks[index].stop - request.blocks[index].start
                if math.floor(room + 1e-9) < 0:
                    break
                kept.add(index)
        keep.append(kept)
    return keep


@MANY
@given(shapes(), st.integers(0, 64).map(lambda n: n / 64))
def test_multi_infllm_fills_each_chunk_by_itself(shape: Shape, ratio: float) -> None:
    request = request_of(shape)
    select = MultiInfllmSelect(max_kept_ratio=ratio)
    chosen = select.choose(request.mean_query, request.inputs, request.layout)
    assert chosen.keep.dtype == torch.bool and chosen.keep.device.type == "cpu"
    assert sets(chosen.keep) == slow_infllm(request, ratio)


def test_chunks_do_not_compete_in_multi_infllm() -> None:
    """A chunk whose blocks all score higher gets no room of another's."""
    request = request_of(Shape(seed=20, lengths=(40, 40, 40)))
    select = MultiInfllmSelect(max_kept_ratio=0.5)
    before = select.choose(request.mean_query, request.inputs, request.layout).keep
    scaled = request.inputs.block_means.clone()
    scaled[:, request.layout.block_chunk == 1] *= 100
    inputs = replace(request.inputs, block_means=scaled)
    assert torch.equal(select.choose(request.mean_query, inputs, request.layout).keep, before)
    of_chunk = [before[:, request.layout.block_chunk == c].sum(1).tolist() for c in range(3)]
    assert of_chunk == [[5, 5]] * 3  # blocks of 4: half of 40 tokens, 3 of them anchors
    assert select.probes and select.needs == {"block_means"}
    assert torch.equal(select.probe_blocks(request.layout), request.layout.is_anchor)


# --- APE ---------------------------------------------------------------------------------------


def merged(
    query: Vector,
    keys: list[Vector],
    values: list[Vector],
    scaling: float,
    is_context: list[bool],
    temperature: float,
    scale: float,
) -> Vector:
    """Two softmaxes, one for the context and one for the rest, merged by their log-sum-exps."""
    parts = []
    for context in (True, False):
        rows = [i for i, flag in enumerate(is_context) if flag is context]
        if not rows:
            continue
        logits = [scaling * dot(query, keys[i]) / (temperature if context else 1) for i in rows]
        top = max(logits)
        total = sum(math.exp(x - top) for x in logits)
        weights = [math.exp(x - top) / total for x in logits]
        output = [
            sum(w * values[i][d] for w, i in zip(weights, rows, strict=True))
            for d in range(len(values[0]))
        ]
        mass = top + math.log(total)
        parts.append((scale * mass if context else mass, output))
    top = max(mass for mass, _ in parts)
    total = sum(math.exp(mass - top) for mass, _ in parts)
    return [
        sum(math.exp(mass - top) / total * output[d] for mass, output in parts)
        for d in range(len(values[0]))
    ]


@MANY
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(1, 1), (2, 1), (2, 3), (1, 4)]),
    st.integers(1, 9),
    st.integers(1, 4),
    st.floats(0.05, 3),
    st.floats(0, 2),
    st.booleans(),
    st.booleans(),
)
def test_ape_merges_two_softmaxes(
    seed: int,
    heads: tuple[int, int],
    n_keys: int,
    n_rows: int,
    temperature: float,
    scale: float,
    is_masked: bool,
    by_head: bool,
) -> None:
    """Any grouping of heads, queries that see part of the keys, flags one for all or one a head."""
    groups, per_group = heads
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query = normal(1, groups * per_group, n_rows, 4)
    keys, values = normal(1, groups, n_keys, 4), normal(1, groups, n_keys, 4)
    flags = torch.rand(groups if by_head else 1, n_keys, generator=generator) < 0.6
    mask = torch.rand(n_rows, n_keys, generator=generator) < 0.6
    mask[:, seed % n_keys] = True  # every query sees something, its own key at least
    attend = ApeAttention(temperature=temperature, scale=scale)
    found = attend(
        query, keys, values, 0.5, mask if is_masked else None, flags if by_head else flags[0]
    )
    assert found.shape == query.shape and found.dtype == query.dtype
    for h in range(groups * per_group):
        g = h // per_group
        for row in range(n_rows):
            seen = [i for i in range(n_keys) if bool(mask[row, i]) or not is_masked]
            expected = merged(
                query[0, h, row].tolist(),
                keys[0, g, seen].tolist(),
                values[0, g, seen].tolist(),
                0.5,
                flags[g if by_head else 0, seen].tolist(),
                temperature,
                scale,
            )
            # float32 logits of up to 200 (temperature 0.05), each off by 1e-5, in an exponent
            torch.testing.assert_close(
                found[0, h, row], torch.tensor(expected), rtol=1e-3, atol=1e-4
            )


def test_ape_returns_the_dtype_of_the_model() -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(1, n, 6, 8, generator=generator) for n in (4, 2, 2))
    flags = torch.tensor([True, True, False, True, False, False])
    wide = ApeAttention()(query, keys, values, 0.3, None, flags)
    narrow = ApeAttention()(query.bfloat16(), keys.bfloat16(), values.bfloat16(), 0.3, None, flags)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), wide, rtol=0.05, atol=0.05)


def test_ape_reads_its_shared_prefix_once() -> None:
    """Chunks are prefilled after the prefix text, which stands in the prompt once, uncached."""
    system = "You answer briefly.\n\n"
    engine = Engine(tiny_model("llama"), block_size=8, prefix_text=system)
    engine.cache_chunks(CHUNKS)
    _, query = first_logits(engine, system + FROM_THE_START, CHUNKS, "ape")
    layout = query.layout
    n_prefix = len(system) + 1  # BOS
    assert layout.n_prefix == n_prefix and bool(layout.uncached[:n_prefix].all())
    assert layout.prefilled_positions.tolist() == [
        n_prefix + i for text in CHUNKS for i in range(len(text))
    ]
    keys, _ = cached_entries(engine, layout, CHUNKS)
    for token in (0, 89, 90, 200):
        place, at = int(layout.context_positions[token]), int(layout.prefilled_positions[token])
        expected = turned(keys[2, token], at, engine.model)
        torch.testing.assert_close(query.cache.keys[2][place], expected, rtol=1e-4, atol=1e-4)


# --- the table ---------------------------------------------------------------------------------


def test_the_rows_of_the_table() -> None:
    """Their defaults are what the papers have (docs/methods.md)."""
    rows = {
        "multi-infllm": (MultiInfllmSelect(max_kept_ratio=0.2), RecomputeNone(), "global", None),
        "cacheblend": (SelectAll(), CacheblendRecompute(ratio=0.15, layer=1), "global", None),
        "epic": (SelectAll(), EpicRecompute(first=16, last=0, ratio=None), "global", None),
        "a3": (SelectAll(), A3Recompute(ratio=0.15, layer=1), "global", None),
        "ape": (SelectAll(), RecomputeNone(), "local", ApeAttention(temperature=0.9, scale=0.9)),
    }
    for name, (select, recompute, positions, attend) in rows.items():
        method = METHODS[name]
        assert (method.select, method.recompute) == (select, recompute), name
        assert (method.positions, method.attend) == (positions, attend), name
        assert method.update is overwrite and method.name == name
        assert method.paper and method.summary
    assert {name for name, m in METHODS.items() if m.attend is not None} == {"ape"}
    assert {name for name, m in METHODS.items() if m.positions == "local"} == {
        "reuse-local", "ape",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("part", "option", "value", "allowed"),
    [
        (MultiInfllmSelect, "max_kept_ratio", -0.1, "between 0 and 1"),
        (MultiInfllmSelect, "max_kept_ratio", 1.5, "between 0 and 1"),
        (MultiInfllmSelect, "max_kept_ratio", math.nan, "between 0 and 1"),
        (MultiInfllmSelect, "max_kept_ratio", None, "between 0 and 1"),
        (CacheblendRecompute, "ratio", 1.01, "between 0 and 1"),
        (CacheblendRecompute, "ratio", None, "between 0 and 1"),
        (CacheblendRecompute, "layer", -1, "0 or more"),
        (A3Recompute, "ratio", -0.5, "between 0 and 1"),
        (A3Recompute, "ratio", math.inf, "between 0 and 1"),
        (A3Recompute, "layer", -3, "0 or more"),
        (EpicRecompute, "first", -1, "0 or more"),
        (EpicRecompute, "last", -2, "0 or more"),
        (EpicRecompute, "ratio", 1.5, "between 0 and 1"),
        (EpicRecompute, "ratio", math.nan, "between 0 and 1"),
        (ApeAttention, "temperature", 0, "above 0"),
        (ApeAttention, "temperature", -1.0, "above 0"),
        (ApeAttention, "temperature", math.nan, "above 0"),
        (ApeAttention, "scale", -0.1, "0 or more"),
        (ApeAttention, "scale", math.nan, "0 or more"),
    ],
)
def test_bad_options_name_the_value_and_what_is_allowed(
    part: type, option: str, value: object, allowed: str
) -> None:
    with pytest.raises(InvalidOption) as raised:
        part(**{option: value})
    assert f"{option}={value!r}" in str(raised.value)
    assert allowed in str(raised.value)


# --- anything ----------------------------------------------------------------------------------

share = st.floats(0, 1)
letters = st.text("abcdefgh \n.é", min_size=1, max_size=60)
cuts = st.sampled_from(["whole", "at both ends", "in two"])

selections = st.one_of(
    st.just(SelectAll()),
    st.builds(MultiInfllmSelect, max_kept_ratio=share),
    st.builds(
        SamkvSelect, max_kept_ratio=st.none() | share, bias=st.booleans(), middle=st.booleans()
    ),
)
recomputations = st.one_of(
    st.just(RecomputeNone()),
    st.just(RecomputeAll()),
    st.builds(CacheblendRecompute, ratio=share, layer=st.integers(0, 5)),
    st.builds(A3Recompute, ratio=share, layer=st.integers(0, 5)),
    st.builds(
        EpicRecompute,
        first=st.integers(0, 20),
        last=st.integers(0, 20),
        ratio=st.none() | share,
    ),
    st.builds(SamkvRecompute, anchors=st.booleans(), outliers=st.booleans()),
    st.builds(
        GuidedRecompute,
        first=st.integers(0, 5),
        matched=st.integers(0, 140),
        small_context=st.integers(0, 30),
    ),
)
methods = st.builds(
    Method,
    name=st.just("any"),
    paper=st.just("-"),
    summary=st.just("-"),
    select=selections,
    recompute=recomputations,
    update=st.one_of(st.just(overwrite), st.builds(Fusion, weight=st.none() | share)),
    positions=st.sampled_from(("global", "local")),
    attend=st.none()
    | st.builds(ApeAttention, temperature=st.floats(0.05, 20), scale=st.floats(0, 3)),
)


def most_kept(method: Method, layout: Layout) -> float:
    """Tokens that the method may keep at a layer at most."""
    select, n_context = method.select, layout.n_context
    if n_context <= method.recompute.whole_tokens:
        return n_context
    lengths, anchors = [0] * layout.n_chunks, [0] * layout.n_chunks
    for n, chunk, is_anchor in zip(
        layout.block_lengths.tolist(), layout.block_chunk.tolist(), layout.is_anchor.tolist(),
        strict=True,
    ):  # fmt: skip
        lengths[chunk] += n
        anchors[chunk] += n if is_anchor else 0
    if isinstance(select, MultiInfllmSelect):
        return sum(
            max(select.max_kept_ratio * n, of) for n, of in zip(lengths, anchors, strict=True)
        )
    if isinstance(select, SamkvSelect):
        cap = 1.0 if select.max_kept_ratio is None else select.max_kept_ratio
        return max(cap * n_context if select.middle else 0, sum(anchors))
    return n_context


def cut(text: str, how: str) -> list[str]:
    """The pieces of a text that a prompt holds."""
    middle = len(text) // 2
    return {
        "whole": [text],
        "at both ends": [text[3:-2]],
        "in two": [text[:middle], text[middle + 1 :]],
    }[how]


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(letters, cuts), max_size=3),
    st.tuples(st.text("abcdefgh .", min_size=40, max_size=60), cuts),
    st.sampled_from(["", "Read: "]),
    st.sampled_from(["", "?", "\n\nWhy was it so?"]),
    methods,
    st.sampled_from(["none", *sorted(EVICTIONS)]),
    st.sampled_from((4, 8, 16)),
)
def test_any_method_answers_and_keeps_to_its_budget(
    some: list[tuple[str, str]],
    long: tuple[str, str],
    before: str,
    question: str,
    method: Method,
    eviction: str,
    store_bits: int,
) -> None:
    held = {text.strip(): cut(text.strip(), how) for text, how in (*some, long)}
    assume(all(held) and max(map(len, held[long[0].strip()])) >= MIN_RUN)
    engine = Engine(tiny_model("llama"), block_size=4, store_bits=store_bits)
    engine.cache_chunks(list(held))
    prompt = before + "\n".join("\n > ".join(of) for of in held.values()) + question
    logits, query = first_logits(engine, prompt, None, method)
    assert bool(logits.isfinite().all())
    layout, report = query.layout, query.report
    assert layout.n_chunks >= 1 and report.chunk_misses == {}
    kept = query.kept[:, layout.block_of_token].sum(1)
    limit = most_kept(method, layout)
    assert float(kept.max()) <= limit + 1e-6
    # a last token of a chunk is computed, and stays
    n_last = int(layout.uncached[layout.context_positions].sum())
    assert 0 <= report.kept_ratio <= min(1.0, (limit + n_last) / layout.n_context + 1e-9)
    assert 0 <= report.recompute_ratio <= 1
    again, _ = first_logits(engine, prompt, None, method)
    # the second goes on from a beginning in memory: other sums in float32
    torch.testing.assert_close(again, logits, rtol=1e-4, atol=1e-4)
    answer = engine.generate(prompt, method=method, eviction=eviction, max_new_tokens=3)
    assert 0 <= answer.report.kept_ratio <= report.kept_ratio
    assert answer.report.recompute_ratio == report.recompute_ratio


@pytest.mark.parametrize(("family", "method"), covering(FAMILIES, list(METHODS), times=2))
def test_every_method_answers_on_every_family(family: str, method: str) -> None:
    engine = engine_of(family)
    rng = random.Random(7)
    chunks = [CHUNKS[i] for i in rng.sample(range(len(CHUNKS)), 3)]
    prompt = "Read:\n" + "\n".join(chunks) + "\nWhy?"
    logits, _ = first_logits(engine, prompt, chunks, method)
    assert bool(logits.isfinite().all()) and float(logits.std()) > 1
    answer = engine.generate(prompt, chunks, method=method, max_new_tokens=4)
    assert (answer.report.method, answer.report.found) == (method, 3)
    assert answer.report.chunk_misses == {}
    alone = engine.stream(prompt, chunks, method=method, max_new_tokens=4)
    assert "".join(alone) == answer.text
    assert alone.finish_reason == "stop" or answer.report.completion_tokens == 4


def test_the_helper_that_reads_a_layer_is_not_blind() -> None:
    """Otherwise the comparisons by hooks could pass on anything."""
    engine = engine_of("qwen3")
    _, query = first_logits(engine, PROMPT, CHUNKS, "recompute")
    made = projected(engine.model, 2, query.layout.token_ids)
    for place in (0, 50, 120):
        key = turned(made["k"][place], place, engine.model)
        torch.testing.assert_close(query.cache.keys[2][place], key, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            query.cache.values[2][place], made["v"][place], rtol=1e-4, atol=1e-4
        )
