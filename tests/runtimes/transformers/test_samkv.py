"""SamKV's selection, recomputation and fusion: the paper's equations, worked out by hand."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from samkv_integrations.engine import Engine
from samkv_integrations.methods import METHODS
from samkv_integrations.methods.base import Method, RecomputeNone
from samkv_integrations.methods.baselines import RecomputeAll
from samkv_integrations.prompt.layout import ChunkPart, Layout
from samkv_integrations.runtimes.transformers.entries.attention_stats import (
    MIN_CHUNKS,
    stable_layers,
)
from samkv_integrations.runtimes.transformers.entries.cache_arrays import local_query, statistics
from samkv_integrations.runtimes.transformers.entries.quantise import rotate
from samkv_integrations.runtimes.transformers.layout import TensorLayout
from samkv_integrations.runtimes.transformers.papers.base import (
    ProbedLayer,
    SelectionInputs,
    fill_budget,
)
from samkv_integrations.runtimes.transformers.papers.multi_infllm import MultiInfllmSelect
from samkv_integrations.runtimes.transformers.papers.samkv import (
    SamkvRecompute,
    SamkvSelect,
    fuse,
    personalise,
    selected_share,
)
from samkv_integrations.store.chunk import BlockScheme
from tests.support.asking import Asked, ask
from tests.support.chunks import cache_of, decoded
from tests.support.layouts import tensor_layout_of
from tests.support.models import tiny_model
from tests.support.tensors import sets


def test_equation_1_biases_each_chunk_by_the_others() -> None:
    """One head of two channels; cosines of the question's query and the chunks' are 1, 0, 0.6."""
    query, local = torch.tensor([[[1.0, 0]]]), torch.tensor([[[[2.0, 0]], [[0, 3]], [[3, 4]]]])
    expected = torch.tensor([[[[1.9, 1.2]], [[2.9, 1.2]], [[2.0, 0.0]]]])
    torch.testing.assert_close(personalise(query, local), expected)


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


@pytest.mark.parametrize(("cap", "chosen"), [(None, {1, 2, 11}), (0.4, {1, 11}), (0.3, set())])
def test_the_best_shares_of_chunks_compete(cap: float | None, chosen: set[int]) -> None:
    """Two chunks of ten blocks, of which seven are no anchors, and a query that reads their means.

    Of the first chunk half is a candidate, (7 - 4) / (7 - 1), so four blocks; of the second a
    tenth, so one. Three of these five stay: 11, which has nearly all of its chunk's softmax, 1, 2.
    A cap leaves room for 2 blocks beside the 24 tokens of anchors, or for none.
    """
    layout = tensor_layout_of((40, 40))
    means = torch.zeros(1, 20, 1, 1)
    means[0, 1:8, 0, 0] = torch.arange(7.0, 0.0, -1)
    means[0, 11] = 10.0
    inputs = SelectionInputs(
        n_layers=1, block_means=means, anchor_mean=torch.tensor([[[[4.0]], [[9.0]]]]),
        block_max=torch.tensor([[1, 11]]), block_min=torch.tensor([[7, 12]]), stable_layers=(0,),
    )  # fmt: skip
    select = SamkvSelect(max_kept_ratio=cap, bias=False)
    keep = select.choose(torch.ones(1, 1, 1), inputs, layout)
    assert keep.device.type == "cpu"
    assert sets(keep) == [{0, 8, 9, 10, 18, 19} | chosen]


@pytest.mark.parametrize(
    ("budget", "kept"),
    [(-1, []), (0, []), (3, []), (4, [3]), (7.9, [3]), (8, [3, 1]), (9, [3, 1]), (10, [3, 1, 4])],
)
def test_a_budget_is_filled_to_its_last_token(budget: float, kept: list[int]) -> None:
    """Blocks of 4, the last of 2; filling ends at the first block that does not fit, so the short
    one never slips in before its turn."""
    layout = tensor_layout_of((18,))
    order = torch.tensor([[-math.inf, 2.0, -math.inf, math.inf, -5.0]])
    assert sets(fill_budget(order, layout, budget)) == [set(kept)]


def test_anchors_and_outliers_of_kept_blocks_are_recomputed() -> None:
    layout = tensor_layout_of((24,), before=1)
    keep = torch.tensor([[True, True, False, True, False, True]])  # blocks of four tokens
    outliers = torch.zeros(1, 24, dtype=torch.bool)
    outliers[0, [5, 9, 14]] = True
    inputs = SelectionInputs(n_layers=1, outliers=outliers)
    anchors = {*range(4), *range(20, 24)}
    rows = SamkvRecompute().choose_layers(keep[:, layout.block_of_token], inputs, layout)
    assert sets(rows) == [{5, 14} | anchors]


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
    layout = TensorLayout(Layout([*first, *(9,) * 40, 5], parts, prefix))
    assert layout.exact.tolist() == [exact, False]
    kept = torch.ones(1, 40, dtype=torch.bool)
    inputs = SelectionInputs(n_layers=1, outliers=torch.zeros_like(kept))
    rows = SamkvRecompute().choose_layers(kept, inputs, layout)
    anchors = [True] * 4 + [False] * 8 + [True] * 8
    assert rows[0, 20:].tolist() == anchors
    assert rows[0, :20].tolist() == ([False] * 20 if exact else anchors)


def test_fusion_mixes_in_float32_and_returns_the_dtype_of_the_new_entries() -> None:
    """bfloat16 entries: the result is the exact mix rounded once (half a step is 2^-9 of it)."""
    generator = torch.Generator().manual_seed(0)
    cached = torch.randn(50, 2, 16, generator=generator).bfloat16()
    fresh = (cached + 0.5 * torch.randn(50, 2, 16, generator=generator)).bfloat16()
    fused = fuse(cached, fresh)
    assert fused.dtype == torch.bfloat16
    exact = fuse(cached.float(), fresh.float())
    assert torch.equal(fused, exact.bfloat16())


def test_equation_4_weighs_each_token_by_its_own_cosine() -> None:
    cached = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]])
    computed = torch.tensor([[[0.0, 1.0]], [[2.0, 0.0]]])
    # orthogonal: theta 0, the old entry stays; parallel: theta 1, the new entry replaces it
    assert fuse(cached, computed).tolist() == [[[1.0, 0.0]], [[2.0, 0.0]]]


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


@pytest.mark.parametrize("part", [SamkvSelect(), MultiInfllmSelect()])
def test_the_query_is_the_mean_of_the_question_s_before_rotation(part: Any) -> None:
    """Of the last plain text alone, whatever else the probe has computed before it."""
    generator = torch.Generator().manual_seed(0)
    plain, turns = (torch.randn(7, n, generator=generator) for n in (16, 2))
    angle = torch.cat((turns, turns), dim=1)
    plain = plain.view(7, 4, 4)
    probed = ProbedLayer(
        queries=rotate(plain, angle.cos(), angle.sin()).transpose(0, 1),
        cos=angle.cos(), sin=angle.sin(),
    )  # fmt: skip
    found = part.score(probed, tensor_layout_of((20,), question=3))
    torch.testing.assert_close(found, plain[-3:].mean(0), rtol=1e-5, atol=1e-5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watching(SamkvSelect):
    """SamKV's choice, which notes down what it was given."""

    def choose(
        self, scores: Tensor | None, inputs: SelectionInputs, layout: TensorLayout
    ) -> Tensor:
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
        assert torch.equal(inputs.local_query[:, index], local_query(cache))
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
            of_chunk = getattr(statistics(cache), name).long()
            expected = of_chunk + first_block if blocks.middle_blocks else of_chunk
            assert torch.equal(getattr(inputs, name)[:, index], expected)
            if not blocks.middle_blocks:
                assert bool((of_chunk == -1).all())
        tokens = slice(first_token, first_token + blocks.n_tokens)
        assert torch.equal(inputs.outliers[:, tokens], statistics(cache).outliers)
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
                      recompute=RecomputeAll())  # fmt: skip
    asked = run(engine, nothing)
    ((scores, inputs),) = SEEN
    given = {name: value for name, value in vars(inputs).items() if isinstance(value, Tensor)}
    assert scores is None and given == {}
    # token ids, key ranges, and the anchors' entries but those that are all computed again
    caches = [cache_of(engine, text) for text in CHUNKS]
    assert bool(asked.layout.is_anchor.any())
    ids = sum(cache.token_ids.nbytes for cache in caches)
    assert asked.report.bytes_read == ids
