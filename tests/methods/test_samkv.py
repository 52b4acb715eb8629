"""SamKV's selection, recomputation and fusion against loops over plain Python numbers.

The loops follow the equations of the paper one number at a time and share no code with the package.
Inputs are float64 on both sides: then a different order of summation moves a score by about 1e-15,
far less than two random scores ever differ, and every choice must be the same block for block.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from samkv_integrations.cache.attention_stats import MIN_CHUNKS, stable_layers
from samkv_integrations.cache.chunk import BlockScheme
from samkv_integrations.engine.engine import Engine
from samkv_integrations.errors import InvalidOption
from samkv_integrations.eviction import EVICTIONS
from samkv_integrations.methods import METHODS
from samkv_integrations.methods.base import (
    Method,
    RecomputeNone,
    Selection,
    SelectionInputs,
    overwrite,
)
from samkv_integrations.methods.multi_infllm import MultiInfllmSelect
from samkv_integrations.methods.samkv import (
    Fusion,
    SamkvRecompute,
    SamkvSelect,
    personalise,
    selected_share,
)
from samkv_integrations.methods.scoring import fill_budget
from samkv_integrations.prompt.layout import ChunkPart, Layout
from tests.support.asking import Asked, ask
from tests.support.chunks import cache_of, decoded
from tests.support.models import tiny_model
from tests.support.selection_inputs import Block, Request, Shape, as_stored, request_of, shapes

MANY = settings(max_examples=120, deadline=None)
FEW = settings(max_examples=40, deadline=None)
Vector = list[float]


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


# --- the paper in loops ------------------------------------------------------------------------


def loop_personal(query: list[Vector], local: list[list[Vector]], chunk: int) -> list[Vector]:
    """Equation 1 for one chunk, (H, D)."""
    whole = [x for head in query for x in head]
    personal = [list(head) for head in query]
    for j, other in enumerate(local):
        if j == chunk:
            continue
        flat = [x for head in other for x in head]
        cosine = dot(whole, flat) / math.sqrt(dot(whole, whole) * dot(flat, flat))
        for h, head in enumerate(other):
            for d, x in enumerate(head):
                personal[h][d] += abs(cosine) * x / (len(local) - 1)
    return personal


def loop_score(personal: list[Vector], key: list[Vector]) -> float:
    """Inner product of a mean key (G, D) with the mean query of each group, mean over groups."""
    per_group = len(personal) // len(key)
    total = 0.0
    for g, of_group in enumerate(key):
        heads = personal[g * per_group : (g + 1) * per_group]
        mean = [sum(head[d] for head in heads) / per_group for d in range(len(of_group))]
        total += dot(mean, of_group)
    return total / len(key)


@dataclasses.dataclass
class Loops:
    """Every intermediate value of the choice, by layer."""

    scores: list[Vector]  # [layer][block]
    share: Vector  # [chunk]
    candidates: list[set[int]]  # [layer]
    ranked: list[list[int]]  # [layer], best first
    keep: list[set[int]]  # [layer]


def loop_choice(request: Request, select: SamkvSelect) -> Loops:
    inputs, blocks = request.inputs, request.blocks
    chunks = range(len(request.shape.lengths))
    queries, block_means = request.mean_query.tolist(), inputs.block_means.tolist()
    anchor_mean = inputs.anchor_mean.tolist()
    scores: list[Vector] = []
    of_layer: list[Vector] = []  # P(n) of each chunk
    for layer in range(request.shape.n_layers):
        query = queries[layer]
        personal = [
            loop_personal(query, inputs.local_query[layer].tolist(), c) if select.bias else query
            for c in chunks
        ]
        scores.append([loop_score(personal[b.chunk], block_means[layer][b.index]) for b in blocks])
        of_layer.append([])
        for c in chunks:
            share = 0.0
            best, worst = int(inputs.block_max[layer, c]), int(inputs.block_min[layer, c])
            if best >= 0 and worst >= 0:
                top, low = scores[-1][best], scores[-1][worst]
                anchor = loop_score(personal[c], anchor_mean[layer][c])
                if low < anchor <= top:
                    share = (top - anchor) / (top - low)
            of_layer[-1].append(share)
    stable = inputs.stable_layers
    share = [sum(of_layer[n][c] for n in stable) / len(stable) for c in chunks]

    anchors = {b.index for b in blocks if b.anchor}
    n_anchor = sum(b.stop - b.start for b in blocks if b.anchor)
    cap = 1.0 if select.max_kept_ratio is None else select.max_kept_ratio
    candidates, ranked, keep = [], [], []
    for layer in range(request.shape.n_layers):
        of_chunk: list[tuple[float, int]] = []
        for c in chunks:
            best = sorted(request.middle(c), key=lambda b: -scores[layer][b.index])
            if not best:
                continue
            top = scores[layer][best[0].index]
            total = math.log(sum(math.exp(scores[layer][b.index] - top) for b in best))
            # softmax over the chunk's middle blocks; its logarithm has the same order
            of_chunk += [
                (scores[layer][b.index] - top - total, b.index)
                for b in best[: math.ceil(share[c] * len(best))]
            ]
        candidates.append({index for _, index in of_chunk})
        n_kept = math.ceil(len(of_chunk) / len(chunks))
        ranked.append([index for _, index in sorted(of_chunk, reverse=True)[:n_kept]])
        room = cap * request.n_context - n_anchor
        chosen: set[int] = set()
        for index in ranked[-1]:
            room -= blocks[index].stop - blocks[index].start
            if room < 0:
                break
            chosen.add(index)
        keep.append(anchors | chosen)
    return Loops(scores=scores, share=share, candidates=candidates, ranked=ranked, keep=keep)


def sets(mask: Tensor) -> list[set[int]]:
    return [set(row.nonzero()[:, 0].tolist()) for row in mask]


# --- section 3.1 and 3.2 -----------------------------------------------------------------------


@MANY
@given(
    shapes(),
    st.one_of(st.none(), st.floats(0, 1)),
    st.booleans(),
)
def test_the_choice_is_that_of_the_loops(shape: Shape, cap: float | None, bias: bool) -> None:
    request = request_of(shape)
    select = SamkvSelect(max_kept_ratio=cap, bias=bias)
    chosen = select.choose(request.mean_query, request.inputs, request.layout)
    assert chosen.keep.shape == (shape.n_layers, len(request.blocks))
    assert chosen.keep.device.type == "cpu"
    assert sets(chosen.keep) == loop_choice(request, select).keep


@FEW
@given(shapes())
def test_equation_1_biases_each_chunk_by_the_others(shape: Shape) -> None:
    request = request_of(shape)
    query, local = request.mean_query, request.inputs.local_query
    expected = [
        [
            loop_personal(query[layer].tolist(), local[layer].tolist(), chunk)
            for chunk in range(len(shape.lengths))
        ]
        for layer in range(shape.n_layers)
    ]
    actual = personalise(query, local)
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))


def scored(tops: list[float], anchors: list[float], lows: list[float], stable: tuple[int, ...]):
    """P of one chunk from its s_max, s_anc and s_min at each layer."""
    n_layers = len(tops)
    scores = torch.tensor([[low, top] for low, top in zip(lows, tops, strict=True)])
    inputs = SelectionInputs(
        n_layers=n_layers,
        anchor_mean=torch.tensor(anchors)[:, None, None, None],
        block_max=torch.ones(n_layers, 1, dtype=torch.long),
        block_min=torch.zeros(n_layers, 1, dtype=torch.long),
        stable_layers=stable,
    )
    return float(selected_share(torch.ones(n_layers, 1, 1, 1), scores, inputs))


@pytest.mark.parametrize(
    ("top", "anchor", "low", "share"),
    [
        (5.0, 2.0, 1.0, 0.75),
        (5.0, 5.0, 1.0, 0.0),  # the upper end belongs to the interval, and gives nothing
        (5.0, 1.0, 1.0, 0.0),  # the lower end does not; as a share it would be 1
        (5.0, 6.0, 1.0, 0.0),
        (5.0, 0.0, 1.0, 0.0),
        (1.0, 2.0, 5.0, 0.0),  # s_max below s_min
        (2.0, 2.0, 2.0, 0.0),
    ],
)
def test_equation_2(top: float, anchor: float, low: float, share: float) -> None:
    assert scored([top], [anchor], [low], (0,)) == share


def test_equation_3_is_the_mean_over_stable_layers() -> None:
    tops, anchors, lows = [5.0, 5.0, 5.0], [2.0, 4.0, 9.0], [1.0, 1.0, 1.0]
    assert scored(tops, anchors, lows, (0, 1)) == 0.5
    assert scored(tops, anchors, lows, (1, 2)) == 0.125
    assert scored(tops, anchors, lows, (2,)) == 0.0


def test_the_random_requests_hold_what_the_comparison_is_about() -> None:
    """Shares strictly between 0 and 1, chunks without a middle, a cap that cuts, and one that
    does not; otherwise the comparisons above could pass on nothing."""
    partial = no_middle = cut = uncut = across = 0
    for seed in range(120):
        lengths = ((40, 3, 25), (44, 30, 12, 38), (45,))[seed % 3]
        request = request_of(Shape(seed=seed, lengths=lengths))
        loops = loop_choice(request, SamkvSelect(max_kept_ratio=0.5))
        no_middle += any(not request.middle(c) for c in range(len(lengths)))
        partial += any(0.05 < share < 0.95 for share in loops.share)
        anchors = {b.index for b in request.blocks if b.anchor}
        for ranked, keep, candidates in zip(
            loops.ranked, loops.keep, loops.candidates, strict=True
        ):
            cut += len(ranked) > len(keep - anchors)
            uncut += 0 < len(ranked) == len(keep - anchors)
            across += len({request.blocks[i].chunk for i in candidates}) > 1
    assert min(partial, no_middle, cut, uncut, across) >= 10


@pytest.mark.parametrize(
    ("budget", "kept"),
    [(-1, []), (0, []), (3, []), (4, [3]), (7.9, [3]), (8, [3, 1]), (9, [3, 1]), (10, [3, 1, 4])],
)
def test_a_budget_is_filled_to_its_last_token(budget: float, kept: list[int]) -> None:
    """Blocks of 4, the last of 2; filling ends at the first block that does not fit, so the short
    one never slips in before its turn."""
    layout = request_of(Shape(seed=0, lengths=(18,))).layout
    order = torch.tensor([[-math.inf, 2.0, -math.inf, math.inf, -5.0]])
    assert sets(fill_budget(order, layout, budget)) == [set(kept)]


@FEW
@given(shapes(), st.floats(0, 1))
def test_anchors_are_kept_and_the_cap_holds(shape: Shape, cap: float) -> None:
    request = request_of(shape)
    request = as_stored(request)
    keep = (
        SamkvSelect(max_kept_ratio=cap)
        .choose(request.mean_query, request.inputs, request.layout)
        .keep
    )
    sizes = torch.tensor([b.stop - b.start for b in request.blocks])
    anchor = torch.tensor([b.anchor for b in request.blocks])
    assert bool(keep[:, anchor].all())
    kept = (keep * sizes).sum(1)
    assert bool((kept <= max(cap * request.n_context, int(sizes[anchor].sum()))).all())


@FEW
@given(shapes())
def test_the_choice_is_pure(shape: Shape) -> None:
    request = request_of(shape)
    before = {
        name: value.clone()
        for name, value in vars(request.inputs).items()
        if isinstance(value, Tensor)
    }
    query = request.mean_query.clone()
    select = SamkvSelect(max_kept_ratio=0.5)
    once = select.choose(request.mean_query, request.inputs, request.layout).keep.clone()
    again = select.choose(request.mean_query, request.inputs, request.layout).keep
    assert torch.equal(once, again) and torch.equal(query, request.mean_query)
    for name, value in before.items():
        assert torch.equal(value, getattr(request.inputs, name)), name


# --- section 3.3 -------------------------------------------------------------------------------


def random_keep(request: Request) -> Tensor:
    generator = torch.Generator().manual_seed(request.shape.seed + 1)
    return torch.rand(request.shape.n_layers, len(request.blocks), generator=generator) < 0.6


@MANY
@given(shapes(), st.booleans(), st.booleans())
def test_recomputed_tokens_are_those_of_the_loops(
    shape: Shape, anchors: bool, outliers: bool
) -> None:
    request = request_of(shape)
    keep = random_keep(request)
    rows = SamkvRecompute(anchors=anchors, outliers=outliers).choose(
        Selection(keep=keep), request.inputs, request.layout
    )
    for layer in range(shape.n_layers):
        expected = {
            token
            for block in request.blocks
            for token in range(block.start, block.stop)
            if bool(keep[layer, block.index])
            and not request.exact[block.chunk]
            and (
                (anchors and block.anchor)
                or (outliers and bool(request.inputs.outliers[layer, token]))
            )
        }
        assert set(rows[layer].nonzero()[:, 0].tolist()) == expected


@pytest.mark.parametrize(
    ("first", "prefix", "exact"),
    [
        ((1,), (1,), True),
        ((), (), True),
        ((1, 7), (1,), False),  # text between
        ((5,), (1,), False),  # another token in its place
        ((1,), (), False),  # prefilled without what stands in front now
        ((), (1,), False),
    ],
)
def test_a_chunk_is_exact_right_after_its_own_prefix(
    first: tuple[int, ...], prefix: tuple[int, ...], exact: bool
) -> None:
    blocks, n = BlockScheme(size=4).of(20), len(first)
    parts = [ChunkPart.whole(blocks, n), ChunkPart.whole(blocks, n + 20)]
    layout = Layout.of([*first, *(9,) * 40, 5], parts, prefix)
    assert layout.exact.tolist() == [exact, False]
    selection = Selection(keep=torch.ones(1, 10, dtype=torch.bool))
    rows = SamkvRecompute(outliers=False).choose(selection, SelectionInputs(n_layers=1), layout)
    anchors = [True] * 4 + [False] * 8 + [True] * 8
    assert rows[0, 20:].tolist() == anchors
    assert rows[0, :20].tolist() == ([False] * 20 if exact else anchors)


@MANY
@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 6),
    st.integers(1, 3),
    st.integers(1, 8),
    st.one_of(st.none(), st.floats(0, 1)),
)
def test_equation_4(seed: int, rows: int, groups: int, dim: int, weight: float | None) -> None:
    generator = torch.Generator().manual_seed(seed)
    cached = torch.randn(rows, groups, dim, generator=generator, dtype=torch.float64)
    fresh = cached + torch.randn(rows, groups, dim, generator=generator, dtype=torch.float64)
    fused = Fusion(weight=weight)(cached.float(), fresh.float())
    assert fused.dtype == torch.float32 and fused.shape == cached.shape
    for row in range(rows):
        old = [x for head in cached[row].float().tolist() for x in head]
        new = [x for head in fresh[row].float().tolist() for x in head]
        theta = weight
        if theta is None:
            theta = dot(old, new) / math.sqrt(dot(old, old) * dot(new, new))
        expected = [theta * b + (1 - theta) * a for a, b in zip(old, new, strict=True)]
        # float32 arithmetic on values of about 1: a few units of 6e-8 times the sum of 24 terms
        torch.testing.assert_close(
            fused[row].flatten(), torch.tensor(expected), rtol=1e-5, atol=3e-6
        )


def test_fusion_mixes_in_float32_and_returns_the_dtype_of_the_new_entries() -> None:
    """bfloat16 entries: the result is the exact mix rounded once (half a step is 2^-9 of it)."""
    generator = torch.Generator().manual_seed(0)
    cached = torch.randn(50, 2, 16, generator=generator).bfloat16()
    fresh = (cached + 0.5 * torch.randn(50, 2, 16, generator=generator)).bfloat16()
    fused = Fusion()(cached, fresh)
    assert fused.dtype == torch.bfloat16
    exact = Fusion()(cached.float(), fresh.float())
    assert torch.equal(fused, exact.bfloat16())


def test_keys_and_values_have_a_theta_of_their_own_and_so_has_every_token() -> None:
    cached = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]])
    fresh = torch.tensor([[[0.0, 1.0]], [[2.0, 0.0]]])
    # orthogonal: theta 0, the old entry stays; parallel: theta 1, the new entry replaces it
    assert Fusion()(cached, fresh).tolist() == [[[1.0, 0.0]], [[2.0, 0.0]]]


# --- Table 4 as constructor calls --------------------------------------------------------------


def test_without_middle_only_anchors_stay_and_nothing_is_read() -> None:
    method = replace(METHODS["samkv-fusion"], select=SamkvSelect(middle=False))
    assert not method.select.probes
    assert method.select.needs == frozenset()
    request = request_of(Shape(seed=4, lengths=(40, 7, 30)))
    keep = method.select.choose(None, SelectionInputs(n_layers=2), request.layout).keep
    anchors = {b.index for b in request.blocks if b.anchor}
    assert sets(keep) == [anchors, anchors]


def test_without_bias_no_local_query_is_read_or_used() -> None:
    select = replace(METHODS["samkv-overwrite"], select=SamkvSelect(bias=False)).select
    assert isinstance(select, SamkvSelect)
    assert "local_query" not in select.needs
    assert SamkvSelect().needs - select.needs == {"local_query"}
    request = request_of(Shape(seed=5, lengths=(40, 30, 45), scale=0.3))
    bare = replace(request.inputs, local_query=None)
    chosen = select.choose(request.mean_query, bare, request.layout)
    assert sets(chosen.keep) == loop_choice(request, select).keep


def test_bias_matters_to_the_choice() -> None:
    """Otherwise the ablation above could not fail."""
    differ = 0
    for seed in range(20):
        request = request_of(Shape(seed=seed, lengths=(40, 30, 45), scale=0.3))
        keeps = [
            SamkvSelect(max_kept_ratio=None, bias=bias)
            .choose(request.mean_query, request.inputs, request.layout)
            .keep
            for bias in (False, True)
        ]
        differ += not torch.equal(*keeps)
    assert differ >= 10


CHUNKS = ["abcdefgh " * 9, "one two three\n" * 5, "shorter than the rest", "x y z w " * 6]
PROMPT = "Read:\n" + "\n--\n".join(text.strip() for text in CHUNKS) + "\nWhy?"


def run(engine: Engine, method: Method) -> Asked:
    return ask(engine, PROMPT, CHUNKS, method)


@pytest.fixture(scope="module", params=[4, 16])
def engine(request: pytest.FixtureRequest) -> Engine:
    engine = Engine(tiny_model("llama"), block_size=4, store_bits=request.param)
    engine.cache_chunks(CHUNKS)
    return engine


@pytest.mark.parametrize("name", ["samkv-overwrite", "samkv-fusion"])
def test_each_ablation_runs(engine: Engine, name: str) -> None:
    paper = METHODS[name]
    only_anchors = run(engine, replace(paper, select=SamkvSelect(middle=False)))
    layout = only_anchors.layout
    assert torch.equal(only_anchors.kept, layout.is_anchor.repeat(4, 1))
    n_anchor = int(layout.block_lengths[layout.is_anchor].sum())
    report = only_anchors.report
    assert report.kept_ratio == report.recompute_ratio == n_anchor / layout.n_context
    nothing = run(engine, replace(paper, recompute=RecomputeNone())).report
    assert nothing.recompute_ratio == 0
    assert run(engine, replace(paper, select=SamkvSelect(bias=False))).report.kept_ratio > 0
    whole = run(engine, replace(paper, select=SamkvSelect(max_kept_ratio=None)))
    assert whole.report.kept_ratio >= n_anchor / layout.n_context


# --- the question's query ----------------------------------------------------------------------


@FEW
@given(shapes())
def test_the_query_is_the_mean_of_the_question_s_before_rotation(shape: Shape) -> None:
    """Of the last plain text alone, whatever else the probe has computed before it.

    In float32: a rotation is two products of numbers of at most 12, rounded to 6e-8 of them each.
    """
    request = request_of(shape)
    for part in (SamkvSelect(), MultiInfllmSelect()):
        for layer in range(shape.n_layers):
            probed = request.probed(layer)
            expected = []
            for head in probed.queries.tolist():
                rows = []
                for row in range(len(head) - shape.window, len(head)):
                    cos, sin = request.cos[row].tolist(), request.sin[row].tolist()
                    half, x = shape.dim // 2, head[row]
                    first = [x[i] * cos[i] + x[i + half] * sin[i] for i in range(half)]
                    second = [x[i + half] * cos[i] - x[i] * sin[i] for i in range(half)]
                    rows.append(first + second)
                expected.append([sum(x) / shape.window for x in zip(*rows, strict=True)])
            found = part.score(probed, request.layout)
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_the_probe_is_over_the_anchors() -> None:
    layout = request_of(Shape(seed=6, lengths=(40, 7, 30))).layout
    assert SamkvSelect().probes
    assert torch.equal(SamkvSelect().probe_blocks(layout), layout.is_anchor)


# --- the inputs of a real request --------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watching(SamkvSelect):
    """SamKV's choice, which notes down what it was given."""

    def choose(self, scores: Tensor | None, inputs: SelectionInputs, layout: Layout) -> Selection:
        SEEN.append((scores, inputs))
        return super().choose(scores, inputs, layout)


SEEN: list[tuple[Any, SelectionInputs]] = []


def test_the_inputs_of_a_request_are_those_of_its_chunk_caches(engine: Engine) -> None:
    """Anchor means are those of the keys as they are stored; block means were made at ingest, of
    the keys as they were, which the entries of 16 bits still hold."""
    SEEN.clear()
    whole = Engine(engine.model, block_size=4, store_bits=16)
    whole.cache_chunks(CHUNKS)
    layout = run(engine, replace(METHODS["samkv-overwrite"], select=Watching())).layout
    ((scores, inputs),) = SEEN
    assert scores.shape == (4, engine.model.n_heads, engine.model.head_dim)
    # by the rule, from no votes: there are too few chunks
    assert len(CHUNKS) < MIN_CHUNKS
    assert inputs.stable_layers == stable_layers(engine.model.n_layers, None)
    first_block = first_token = 0
    for index, text in enumerate(CHUNKS):
        cache = cache_of(engine, text)
        blocks = cache.blocks
        (keys, _), (exact, _) = decoded(cache), decoded(cache_of(whole, text))
        assert torch.equal(inputs.local_query[:, index], cache.local_query)
        middle = [t for b in blocks.middle_blocks for t in range(*blocks.span(b))]
        anchors = [t for t in range(blocks.n_tokens) if t not in middle]
        # means of 12 or fewer float32 values of about 1
        torch.testing.assert_close(
            inputs.anchor_mean[:, index], keys[:, anchors].mean(1), rtol=1e-5, atol=1e-6
        )
        for block in range(blocks.n_blocks):
            summary = inputs.block_means[:, first_block + block]
            if block not in blocks.middle_blocks:
                assert not bool(summary.any())
                continue
            start, stop = blocks.span(block)
            mean = exact[:, start:stop].mean(1)
            # 8 bits: half a step of a range of +-127 steps, scale rounded to float16 (2^-11)
            error = (summary - mean).abs()
            assert bool((error <= mean.abs().amax(-1, keepdim=True) * (0.5 / 127 + 2**-10)).all())
        for name in ("block_max", "block_min"):
            of_chunk = getattr(cache.statistics, name).long()
            expected = of_chunk + first_block if blocks.middle_blocks else of_chunk
            assert torch.equal(getattr(inputs, name)[:, index], expected)
            if not blocks.middle_blocks:
                assert bool((of_chunk == -1).all())
        tokens = slice(first_token, first_token + blocks.n_tokens)
        assert torch.equal(inputs.outliers[:, tokens], cache.statistics.outliers)
        first_block += blocks.n_blocks
        first_token += blocks.n_tokens
    assert first_token == layout.n_context and first_block == layout.n_blocks


def test_no_more_is_read_than_the_method_needs(engine: Engine) -> None:
    """What a part does not name is not there, and is not counted as read."""
    SEEN.clear()
    run(engine, replace(METHODS["samkv-overwrite"], select=Watching(bias=False)))
    assert SEEN[0][1].local_query is None and SEEN[0][1].anchor_mean is not None
    SEEN.clear()
    nothing = replace(METHODS["samkv-overwrite"], select=Watching(middle=False),
                      recompute=SamkvRecompute(outliers=False))  # fmt: skip
    asked = run(engine, nothing)
    ((scores, inputs),) = SEEN
    given = {name: value for name, value in vars(inputs).items() if isinstance(value, Tensor)}
    assert scores is None and given == {}
    # token ids, key ranges, and the anchors' entries but those that are all computed again
    caches = [cache_of(engine, text) for text in CHUNKS]
    assert bool(asked.layout.is_anchor.any())
    ids = sum(cache.token_ids.nbytes for cache in caches)
    assert asked.report.bytes_read == ids


# --- parts -------------------------------------------------------------------------------------


OF_PAPERS = {
    type(part)
    for method in METHODS.values()
    if not method.paper.startswith(("-", "ours"))
    for part in (method.select, method.recompute, method.attend)
    if part is not None and type(part).__module__ != Method.__module__
} | {type(rule) for rule in EVICTIONS.values()}
"""Parts and rules that follow a paper."""


@pytest.mark.parametrize("part", sorted(OF_PAPERS, key=lambda part: part.__name__))
def test_what_follows_a_paper_says_where_it_stands_and_where_it_deviates(part: type) -> None:
    assert part.__doc__ is not None
    assert re.search(r"section|equation|algorithm", part.__doc__)
    assert "Deviations: " in part.__doc__


def test_the_paper_s_methods_are_made_of_the_paper_s_parts() -> None:
    for name, update in (("samkv-overwrite", overwrite), ("samkv-fusion", Fusion())):
        method = METHODS[name]
        assert method.paper == "arXiv 2508.11661"
        assert method.select == SamkvSelect() and method.recompute == SamkvRecompute()
        assert method.update == update and method.positions == "global"
        assert method.needs == {"block_means", "anchor_mean", "statistics", "local_query"}
    assert SamkvRecompute(outliers=False).needs == frozenset()


@pytest.mark.parametrize("value", [-0.01, 1.01, math.nan, math.inf])
def test_a_cap_that_is_no_share_is_refused(value: float) -> None:
    with pytest.raises(InvalidOption, match="max_kept_ratio=.*between 0 and 1"):
        SamkvSelect(max_kept_ratio=value)


def test_blocks_of_the_loops_are_those_of_the_layout() -> None:
    """One chunk worked out by hand, so that the two ways of counting have a common ground."""
    request = request_of(Shape(seed=0, lengths=(18, 2), before=1))
    expected = [
        Block(index=0, chunk=0, start=0, stop=4, anchor=True, initial=True),
        Block(index=1, chunk=0, start=4, stop=8, anchor=False, initial=False),
        Block(index=2, chunk=0, start=8, stop=12, anchor=False, initial=False),
        Block(index=3, chunk=0, start=12, stop=16, anchor=True, initial=False),
        Block(index=4, chunk=0, start=16, stop=18, anchor=True, initial=False),
        Block(index=5, chunk=1, start=18, stop=20, anchor=True, initial=True),
    ]
    assert request.blocks == expected
    layout = request.layout
    assert layout.is_anchor.tolist() == [b.anchor for b in expected]
    assert layout.block_chunk.tolist() == [b.chunk for b in expected]
    assert layout.block_lengths.tolist() == [b.stop - b.start for b in expected]
