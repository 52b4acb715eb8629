"""The guided selection and recomputation against loops over plain Python numbers.

Scores are shares of attention: logits are sums of at most 100 in all, each part rounded a few times
to float32 (6e-8), and a softmax passes on at most the error of its logits, so 1e-4 is far above
what rounding does; a wrong head, layer or chunk changes scores by tenths. Choices are then followed
from scores that both sides share to the bit, so they must be the same token for token; of equal
scores (tokens that share a hit) the earlier token comes first.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from samkv_integrations.bench.variants import CompetingSelect
from samkv_integrations.errors import InvalidOption
from samkv_integrations.eviction import Quest
from samkv_integrations.methods import METHODS
from samkv_integrations.methods import guided as module
from samkv_integrations.methods.base import Selection, option_names, overwrite
from samkv_integrations.methods.guided import GuidedRecompute, GuidedSelect
from samkv_integrations.methods.parts import Fusion
from samkv_integrations.methods.scoring import dilate, softmax_by_chunk
from tests.support.selection_inputs import Request, Shape, as_stored, request_of, shapes

MANY = settings(max_examples=100, deadline=None)
FEW = settings(max_examples=40, deadline=None)
Vector = list[float]
CLOSE = {"rtol": 0, "atol": 1e-4}


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def softmax(logits: Vector) -> Vector:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [weight / sum(weights) for weight in weights]


def sets(mask: Tensor) -> list[set[int]]:
    return [set(row.nonzero()[:, 0].tolist()) for row in mask]


# --- scores ------------------------------------------------------------------------------------


def loop_scores(request: Request, layer: int, *, compete: bool) -> Vector:
    """[token]: the largest share that a head of the last token gives it, of its own chunk or of
    the whole context. Of the last token of a prompt that ends with a chunk there is no key."""
    shape, keys = request.shape, request.keys[layer].tolist()
    best = [0.0] * request.n_context
    together = [range(request.n_context)] if compete else request.spans
    for h in range(shape.groups * shape.heads):
        asking = request.queries[layer, h, -1].tolist()
        for tokens in together:
            stored = [t for t in tokens if t < len(keys)]
            logits = [dot(asking, keys[t][h // shape.heads]) / math.sqrt(shape.dim) for t in stored]
            for t, weight in zip(stored, softmax(logits) if logits else [], strict=True):
                best[t] = max(best[t], weight)
    return best


@MANY
@given(st.one_of(shapes(), shapes(window=0)), st.booleans())
def test_scores_are_those_of_the_loops_in_the_upper_half_of_the_layers(
    shape: Shape, compete: bool
) -> None:
    request = as_stored(request_of(shape))
    select = CompetingSelect() if compete else GuidedSelect()
    layers = range(shape.n_layers)
    found = [select.score(request.probed(layer), request.layout) for layer in layers]
    lower = shape.n_layers // 2
    assert found[:lower] == [None] * lower
    # the last token of a prompt that ends with a chunk is computed anyway: no score counts
    counted = len(request.keys[0])
    for layer, score in zip(layers[lower:], found[lower:], strict=True):
        assert score.shape == (request.n_context,) and bool(score.isfinite().all())
        expected = torch.tensor(loop_scores(request, layer, compete=compete))
        torch.testing.assert_close(score[:counted], expected[:counted], **CLOSE)
    chosen = select.choose(torch.stack(found[lower:]), request.inputs, request.layout)
    together = torch.stack(found[lower:]).tolist()
    assert chosen.token_scores.tolist() == [max(of) for of in zip(*together, strict=True)]
    assert chosen.keep.shape == (shape.n_layers, len(request.blocks)) and bool(chosen.keep.all())


@MANY
@given(shapes(), st.sampled_from((0.1, 1.0, 30.0)))
def test_a_softmax_by_chunk_is_one_over_each_chunk_alone(shape: Shape, spread: float) -> None:
    request = request_of(shape)
    generator = torch.Generator().manual_seed(shape.seed)
    logits = spread * torch.randn(3, request.n_context, generator=generator)
    shares = softmax_by_chunk(logits, request.layout)
    assert shares.shape == logits.shape
    for head, row in enumerate(logits.tolist()):
        expected: Vector = []
        for tokens in request.spans:
            expected += softmax([row[t] for t in tokens])
        torch.testing.assert_close(shares[head], torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_only_the_last_token_s_attention_counts() -> None:
    request = as_stored(request_of(Shape(seed=3, lengths=(30, 20), n_layers=1, window=3)))
    before = GuidedSelect().score(request.probed(0), request.layout)
    request.queries[0, :, :-1] *= -5
    assert torch.equal(GuidedSelect().score(request.probed(0), request.layout), before)
    request.queries[0, :, -1] *= -5
    assert not torch.equal(GuidedSelect().score(request.probed(0), request.layout), before)


@FEW
@given(shapes())
def test_the_choice_is_pure(shape: Shape) -> None:
    request = as_stored(request_of(shape))
    keys, queries = request.keys.clone(), request.queries.clone()
    layer = shape.n_layers - 1
    once = GuidedSelect().score(request.probed(layer), request.layout)
    scores, given_scores = once[None], once[None].clone()
    chosen = GuidedSelect().choose(scores, request.inputs, request.layout)
    hits = chosen.token_scores.clone()
    part = GuidedRecompute(ratio=0.5, hits=None)
    rows = part.choose(chosen, request.inputs, request.layout)
    assert torch.equal(part.choose(chosen, request.inputs, request.layout), rows)
    assert torch.equal(GuidedSelect().score(request.probed(layer), request.layout), once)
    assert torch.equal(keys, request.keys) and torch.equal(queries, request.queries)
    assert torch.equal(scores, given_scores) and torch.equal(chosen.token_scores, hits)


@MANY
@given(shapes(), st.integers(1, 12), st.integers(0, 6))
def test_the_probe_computes_its_window_and_sinks_of_the_uncached_text(
    shape: Shape, window: int, sinks: int
) -> None:
    layout = request_of(shape).layout
    select = GuidedSelect(window=window, sinks=sinks)
    n, fresh = layout.n_tokens, layout.uncached.tolist()
    expected = [fresh[at] and (at < sinks or at >= n - window) for at in range(n)]
    assert select.probe_tokens(layout).tolist() == expected and expected[-1]
    assert select.probes and bool(select.probe_blocks(layout).all())
    assert select.probe_blocks(layout).shape == (layout.n_blocks,)
    assert select.needs == GuidedRecompute().needs == frozenset()


# --- recomputation -----------------------------------------------------------------------------


def loop_dilate(request: Request, scores: Vector, before: int, after: int) -> Vector:
    """A token's best of its own and those around it in its chunk: up to ``before`` behind it, up
    to ``after`` in front of it."""
    found = []
    for tokens in request.spans:
        for t in tokens:
            found.append(max(scores[s] for s in tokens if t - after <= s <= t + before))
    return found


@MANY
@given(shapes(), st.integers(0, 50), st.integers(0, 50))
def test_scores_are_shared_with_those_around_in_the_chunk(
    shape: Shape, before: int, after: int
) -> None:
    request = request_of(shape)
    generator = torch.Generator().manual_seed(shape.seed)
    scores = torch.rand(request.n_context, generator=generator)
    scores[torch.rand(request.n_context, generator=generator) < 0.2] = -math.inf
    found = dilate(scores, request.layout, before=before, after=after)
    assert found.tolist() == loop_dilate(request, scores.tolist(), before, after)


def loop_tokens(request: Request, hits: Vector, part: GuidedRecompute) -> list[set[int]]:
    """[layer] -> the tokens computed again there, none of what is given anyway.

    Greedily: the token of the highest claim first, the claim being the best score of itself and of
    those around it in its chunk. One whose claim is that of a token behind it leads up to it, and
    is computed in the lower layers only. The first that would exceed the budget ends it.
    """
    n_layers = request.shape.n_layers
    ends_with_chunk = not request.shape.window
    closed = {t for t in range(request.n_context) if request.exact[request.chunk_of(t)]}
    hits = [-math.inf if t in closed else hit for t, hit in enumerate(hits)]
    if ends_with_chunk:
        closed.add(request.n_context - 1)
        hits[-1] = -math.inf
    claims = loop_dilate(request, hits, part.before, module.AFTER)
    behind = loop_dilate(request, hits, 0, module.AFTER)
    for of_chunk, offsets in zip(request.spans, request.held, strict=True):
        n_first = min(part.first, len(of_chunk) // module.TOKENS_A_FIRST)
        for t, offset in zip(of_chunk, offsets, strict=True):
            if offset < n_first:
                claims[t] = behind[t] = math.inf
    lower = math.ceil(part.lead_layers * n_layers)
    rows: list[set[int]] = [set() for _ in range(n_layers)]
    room = part.ratio * request.n_context + 1e-3
    order = sorted((-claims[t], t) for t in range(request.n_context) if t not in closed)
    for _, t in order:
        layers = lower if claims[t] > behind[t] else n_layers
        room -= layers / n_layers
        if room < 0 or not part.ratio:
            break
        for layer in range(layers):
            rows[layer].add(t)
    return rows


@MANY
@given(
    st.one_of(shapes(), shapes(window=0)),
    st.floats(0, 1),
    st.integers(0, 15),
    st.integers(0, 15),
    st.sampled_from((0.0, 0.25, 0.5, 1.0)),
    st.integers(0, 5),
)
def test_recomputed_tokens_are_those_of_the_greedy_loop(
    shape: Shape, ratio: float, before: int, after: int, lead_layers: float, first: int
) -> None:
    request = request_of(shape)
    generator = torch.Generator().manual_seed(shape.seed + 1)
    hits = torch.rand(request.n_context, generator=generator, dtype=torch.float64)
    keep = torch.ones(shape.n_layers, len(request.blocks), dtype=torch.bool)
    part = GuidedRecompute(
        ratio=ratio, hits=None, before=before, lead_layers=lead_layers, first=first
    )
    selection = Selection(keep=keep, token_scores=hits)
    # chunks here have at most 45 tokens
    with patch.multiple(module, TOKENS_A_FIRST=8, AFTER=after):
        rows = part.choose(selection, request.inputs, request.layout)
        assert sets(rows) == loop_tokens(request, hits.tolist(), part)
    assert rows.dtype == torch.bool and rows.device.type == "cpu"
    assert rows.shape == (shape.n_layers, request.n_context)
    # the budget is a mean over layers; what rounding of floats adds is below a thousandth
    assert float(rows.double().sum(1).mean()) <= ratio * request.n_context + 2e-3
    # a pass carries a token through all layers below: tokens never grow in number with depth
    assert bool((rows[1:] <= rows[:-1]).all())


def tokens_of(
    request: Request, scores: dict[int, float], *, after: int = 1, **options: Any
) -> list[set[int]]:
    """Those chosen where these alone have a score, and no chunk's first ones if not asked for."""
    found = torch.zeros(request.n_context)
    for token, score in scores.items():
        found[token] = score
    keep = torch.ones(request.shape.n_layers, len(request.blocks), dtype=torch.bool)
    selection = Selection(keep=keep, token_scores=found)
    part = GuidedRecompute(hits=None, **({"first": 0} | options))
    with patch.object(module, "AFTER", after):
        return sets(part.choose(selection, request.inputs, request.layout))


def test_the_tokens_around_a_hit_are_computed_again_with_it_in_its_own_chunk() -> None:
    """Worked out by hand: chunks of 30, hits in the middle of one, at the beginning of the next and
    at its end."""
    request = request_of(Shape(seed=17, lengths=(30, 30, 30), n_layers=1, before=1))
    assert request.exact == [False] * 3
    middle, ends = {45: 0.9}, {60: 0.9, 89: 0.8}
    around = {"before": 3, "after": 2}
    assert tokens_of(request, middle, ratio=6 / 90 + 1e-9, **around)[0] == {42, 43, 44, 45, 46, 47}
    at_ends = {60, 61, 62, 86, 87, 88, 89}
    assert tokens_of(request, ends, ratio=7 / 90 + 1e-9, **around)[0] == at_ends
    assert tokens_of(request, ends, ratio=3 / 90 + 1e-9, **around)[0] == {60, 61, 62}
    assert tokens_of(request, middle, ratio=1 / 90 + 1e-9, before=0, after=0)[0] == {45}
    ten = tokens_of(request, middle, ratio=10 / 90 + 1e-9)[0]
    assert ten == set(range(37, 47))  # eight before, one after


def test_what_leads_up_to_a_hit_is_computed_in_the_lower_layers_only() -> None:
    """Worked out by hand: a hit at token 45; of four layers, one before it costs half a token."""
    request = request_of(Shape(seed=17, lengths=(30, 30, 30), n_layers=4, before=1))
    # two tokens and four halves
    rows = tokens_of(request, {45: 0.9}, ratio=4 / 90, before=4, after=1, lead_layers=0.5)
    assert rows == [set(range(41, 47))] * 2 + [{45, 46}] * 2


def test_the_first_tokens_of_chunks_come_before_any_hit_and_bring_nobody_along() -> None:
    """Worked out by hand: chunks of 128, 127 and 60 tokens, one first token for every 64."""
    request = request_of(Shape(seed=17, lengths=(128, 127, 60), n_layers=2, before=1))
    begins = {0, 1, 128}
    around = {"first": 3, "before": 4, "after": 2, "lead_layers": 0.5}
    assert tokens_of(request, {200: 0.9}, ratio=3 / 315, **around) == [begins] * 2
    assert tokens_of(request, {200: 0.9}, ratio=2 / 315, **around) == [{0, 1}] * 2
    assert tokens_of(request, {200: 0.9}, ratio=2 / 315, **{**around, "first": 1}) == [{0, 128}] * 2
    # a hit beside them: what is around it is computed with it, and lies in all layers behind it
    assert tokens_of(request, {129: 0.9}, ratio=6 / 315, **around) == [begins | {129, 130, 131}] * 2
    request = request_of(Shape(seed=16, lengths=(64, 64), n_layers=4))
    assert request.exact == [True, False]
    assert tokens_of(request, {}, ratio=0.01, first=2)[0] == {64}


def test_nothing_is_recomputed_of_what_is_exact_however_much_the_question_looks_there() -> None:
    request = request_of(Shape(seed=16, lengths=(60, 40), n_layers=4))
    assert request.exact == [True, False]
    rows = tokens_of(request, {10: 1.0, 70: 0.1}, ratio=0.2)
    assert rows[0] and all(min(of_layer) >= 60 for of_layer in rows)


def test_chunks_do_not_compete_for_recomputation_unless_asked_to() -> None:
    """Worked out by hand: all of the question's attention goes to chunk 1, where it is spread over
    two tokens; the little that chunk 2 gets goes to one."""
    request = as_stored(
        request_of(Shape(seed=15, lengths=(20, 20, 20), n_layers=2, groups=1, heads=1, before=1))
    )
    request.keys[:], request.queries[:] = 0.0, 0.0
    request.queries[..., -1, 0] = 2.0  # times a scaling of a half: a key's logit
    request.keys[1, 25, 0, 0] = request.keys[1, 26, 0, 0] = 20.0
    request.keys[1, 47, 0, 0] = 9.0
    request.keys[0, 33, 0, 0] = 30.0  # a lower layer has no say
    for compete, ratio, expected in (
        (False, 0.02, {47}),
        (False, 0.05, {47, 25, 26}),
        (True, 0.04, {25, 26}),
        (True, 0.05, {25, 26, 47}),
    ):
        select = CompetingSelect() if compete else GuidedSelect()
        score = select.score(request.probed(1), request.layout)
        chosen = select.choose(score[None], request.inputs, request.layout)
        assert float(chosen.token_scores[25]) == pytest.approx(0.5, abs=1e-3)
        if compete:
            assert float(chosen.token_scores[47]) < 1e-4
        else:
            assert float(chosen.token_scores[47]) > 0.99
        part = GuidedRecompute(ratio=ratio, hits=None, before=0, first=0)
        with patch.object(module, "AFTER", 0):
            found = sets(part.choose(chosen, request.inputs, request.layout))
        assert found == [expected, expected]


def test_small_contexts_are_computed_whole_only_where_anything_is() -> None:
    assert GuidedRecompute().whole_tokens == 128
    assert GuidedRecompute(small_context=7).whole_tokens == 7
    assert GuidedRecompute(ratio=0.0).whole_tokens == 0


# --- the method --------------------------------------------------------------------------------


def test_a_tenth_is_recomputed_and_a_tenth_attended_to_by_default() -> None:
    method = METHODS["samkv-guided"]
    assert method.recompute == GuidedRecompute(
        hits=2.5, ratio=0.1, before=8, lead_layers=0.75, first=4, small_context=128
    )
    assert method.select == GuidedSelect(window=64, sinks=4)
    assert module.AFTER == 1
    assert method.update is overwrite and method.positions == "global" and method.attend is None
    assert method.eviction == Quest(budget_ratio=0.1)
    assert {name for name, m in METHODS.items() if m.eviction is not None} == {
        "samkv-guided",
        "auto",
    }


@pytest.mark.parametrize("paper", ["2508.11661", "2503.08879", "A3", "2406.10774"])
def test_the_papers_that_it_takes_from_are_named(paper: str) -> None:
    assert module.__doc__ is not None and paper in module.__doc__


@pytest.mark.parametrize(
    ("part", "option", "value", "allowed"),
    [
        (GuidedSelect, "window", 0, "at least 1"),
        (GuidedSelect, "window", -3, "at least 1"),
        (GuidedSelect, "sinks", -1, "0 or more"),
        (GuidedRecompute, "ratio", -0.1, "between 0 and 1"),
        (GuidedRecompute, "ratio", 2, "between 0 and 1"),
        (GuidedRecompute, "ratio", None, "between 0 and 1"),
        (GuidedRecompute, "ratio", math.nan, "between 0 and 1"),
        (GuidedRecompute, "before", -1, "0 or more"),
        (GuidedRecompute, "first", -3, "0 or more"),
        (GuidedRecompute, "small_context", -1, "0 or more"),
        (GuidedRecompute, "lead_layers", 1.5, "between 0 and 1"),
        (GuidedRecompute, "lead_layers", math.nan, "between 0 and 1"),
        (Fusion, "weight", 1.5, "between 0 and 1"),
    ],
)
def test_bad_options_name_the_value_and_what_is_allowed(
    part: type, option: str, value: object, allowed: str
) -> None:
    with pytest.raises(InvalidOption) as raised:
        part(**{option: value})
    message = str(raised.value)
    assert f"{option}={value!r}" in message
    assert allowed in message


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="max_kept"):
        GuidedSelect(max_kept=0.2)


def test_the_default_is_the_method_to_copy() -> None:
    """Short enough to be read at once, with few enough knobs to be known by heart."""
    lines = Path(module.__file__).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert len(option_names(METHODS["samkv-guided"])) <= 8
