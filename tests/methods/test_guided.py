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
    part = GuidedRecompute(first=3, hits=2.0)
    rows = part.choose(chosen, request.inputs, request.layout)
    assert torch.equal(part.choose(chosen, request.inputs, request.layout), rows)
    assert torch.equal(GuidedSelect().score(request.probed(layer), request.layout), once)
    assert torch.equal(keys, request.keys) and torch.equal(queries, request.queries)
    assert torch.equal(scores, given_scores) and torch.equal(chosen.token_scores, hits)


@MANY
@given(shapes(), st.integers(1, 12), st.integers(0, 30))
def test_the_probe_computes_its_window_and_sinks_where_chunks_are_long(
    shape: Shape, window: int, long: int
) -> None:
    request = request_of(shape)
    layout, select = request.layout, GuidedSelect(window=window, long=long)
    n, fresh = layout.n_tokens, layout.uncached.tolist()
    is_long = request.n_context / len(request.spans) >= long
    expected = [
        is_long and fresh[at] and (at < module.SINKS or at >= n - window) for at in range(n)
    ]
    assert select.probe_tokens(layout).tolist() == expected
    assert select.probes and bool(select.probe_blocks(layout).all())
    assert select.probe_blocks(layout).shape == (layout.n_blocks,)
    assert select.needs == GuidedRecompute().needs == frozenset()


def test_without_a_probe_nothing_has_a_score() -> None:
    request = request_of(Shape(seed=3, lengths=(30, 20)))
    chosen = GuidedSelect().choose(None, request.inputs, request.layout)
    assert chosen.token_scores is None and bool(chosen.keep.all())


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


def loop_tokens(request: Request, scores: Vector | None, part: GuidedRecompute) -> set[int]:
    """The tokens computed again, none of what is given anyway: first ones of each chunk, then the
    tokens of the highest scores, and those around them in their chunk."""
    closed = {t for t in range(request.n_context) if request.exact[request.chunk_of(t)]}
    if not request.shape.window:  # the prompt ends with a chunk
        closed.add(request.n_context - 1)
    lengths = request.layout.chunk_lengths.tolist()
    found = set()
    for of_chunk, offsets, length in zip(request.spans, request.held, lengths, strict=True):
        n_first = max(part.first, math.floor(torch.tensor(part.share) * length))
        found |= {t for t, o in zip(of_chunk, offsets, strict=True) if o < n_first}
    if scores is not None:
        open_ones = [t for t in range(request.n_context) if t not in closed | found]
        n_hits = round(part.hits * len(request.spans))
        hits = set(sorted(open_ones, key=lambda t: (-scores[t], t))[:n_hits])
        for of_chunk in request.spans:
            for t in of_chunk:
                around = range(t - module.AFTER, t + module.BEFORE + 1)
                if any(s in hits and s in of_chunk for s in around):
                    found.add(t)
    return found - closed


@MANY
@given(
    st.one_of(shapes(), shapes(window=0)),
    st.integers(0, 20),
    st.floats(0, 1),
    st.floats(0, 6),
    st.integers(0, 12),
    st.booleans(),
)
def test_recomputed_tokens_are_those_of_the_loop(
    shape: Shape, first: int, share: float, hits: float, before: int, scored: bool
) -> None:
    request = request_of(shape)
    generator = torch.Generator().manual_seed(shape.seed + 1)
    scores = torch.rand(request.n_context, generator=generator) if scored else None
    keep = torch.ones(shape.n_layers, len(request.blocks), dtype=torch.bool)
    part = GuidedRecompute(first=first, share=share, hits=hits)
    selection = Selection(keep=keep, token_scores=scores)
    with patch.object(module, "BEFORE", before):
        rows = part.choose(selection, request.inputs, request.layout)
        expected = loop_tokens(request, None if scores is None else scores.tolist(), part)
    assert sets(rows) == [expected] * shape.n_layers
    assert rows.dtype == torch.bool and rows.device.type == "cpu"


def tokens_of(request: Request, scores: dict[int, float] | None, **options: Any) -> set[int]:
    """Those chosen where these alone have a score; with ``first=0`` they are hits."""
    found = None
    if scores is not None:
        found = torch.full((request.n_context,), -math.inf)
        for token, score in scores.items():
            found[token] = score
    keep = torch.ones(request.shape.n_layers, len(request.blocks), dtype=torch.bool)
    part = GuidedRecompute(**({"first": 0, "share": 0.0} | options))
    rows = part.choose(Selection(keep=keep, token_scores=found), request.inputs, request.layout)
    assert bool((rows == rows[0]).all())
    return sets(rows)[0]


def test_the_tokens_around_a_hit_are_computed_again_with_it_in_its_own_chunk() -> None:
    """Worked out by hand: chunks of 30, hits in the middle of one and at both ends of the next."""
    request = request_of(Shape(seed=17, lengths=(30, 30, 30), n_layers=2, before=1))
    assert request.exact == [False] * 3
    assert tokens_of(request, {45: 0.9}) == set(range(37, 47))  # eight before, one after
    assert tokens_of(request, {60: 0.9, 89: 0.8}) == {60, 61, *range(81, 90)}
    two = {45: 0.9, 50: 0.8, 20: 0.7, 80: 0.6}
    assert tokens_of(request, two, hits=2 / 3) == set(range(37, 52))  # the best two of all chunks
    assert tokens_of(request, two, hits=0.0) == set()


def test_first_tokens_are_a_count_or_a_share_of_long_chunks() -> None:
    """Worked out by hand: chunks of 128, 40 and 10 tokens."""
    request = request_of(Shape(seed=17, lengths=(128, 40, 10), n_layers=2, before=1))
    expected = {*range(8), *range(128, 131), *range(168, 171)}
    assert tokens_of(request, None, first=3, share=1 / 16) == expected
    assert tokens_of(request, None, first=12) == {*range(12), *range(128, 140), *range(168, 178)}
    # a first token is no hit: the next best is
    assert tokens_of(request, {0: 0.9, 60: 0.1}, first=3, hits=1 / 3) >= {52, 60, 61}


def test_nothing_is_recomputed_of_what_is_exact_however_much_the_question_looks_there() -> None:
    request = request_of(Shape(seed=16, lengths=(60, 40), n_layers=4))
    assert request.exact == [True, False]
    found = tokens_of(request, {10: 1.0, 70: 0.1}, first=2)
    assert found == {60, 61, *range(62, 72)}


@pytest.mark.parametrize("first", [0, 3, 20, 60])
@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("hits", [0.0, 1.0, 2.0])
def test_auto_weighs_no_less_than_what_is_recomputed(first: int, share: float, hits: float) -> None:
    request = request_of(Shape(seed=16, lengths=(40, 40, 40), n_layers=2, before=1))
    scores = torch.rand(120, generator=torch.Generator().manual_seed(5))
    keep = torch.ones(2, len(request.blocks), dtype=torch.bool)
    part = GuidedRecompute(first=first, share=share, hits=hits)
    for found in (None, scores):
        chosen = Selection(keep=keep, token_scores=found)
        rows = part.choose(chosen, request.inputs, request.layout)
        most = part.most_ratio(120, 3, scored=found is not None)
        assert float(rows.double().mean()) <= most + 1e-6
        if found is None:
            assert float(rows.double().mean()) == pytest.approx(most)


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
    for compete, hits, expected in (
        (False, 1 / 3, {47}),
        (False, 1.0, {47, 25, 26}),
        (True, 2 / 3, {25, 26}),
        (True, 1.0, {25, 26, 47}),
    ):
        select = CompetingSelect() if compete else GuidedSelect()
        score = select.score(request.probed(1), request.layout)
        chosen = select.choose(score[None], request.inputs, request.layout)
        assert float(chosen.token_scores[25]) == pytest.approx(0.5, abs=1e-3)
        if compete:
            assert float(chosen.token_scores[47]) < 1e-4
        else:
            assert float(chosen.token_scores[47]) > 0.99
        part = GuidedRecompute(hits=hits, share=0.0, first=0)
        with patch.multiple(module, BEFORE=0, AFTER=0):
            found = sets(part.choose(chosen, request.inputs, request.layout))
        assert found == [expected, expected]


def test_small_contexts_are_computed_whole() -> None:
    assert GuidedRecompute().whole_tokens == 128
    assert GuidedRecompute(small_context=7).whole_tokens == 7


# --- the method --------------------------------------------------------------------------------


def test_first_tokens_and_a_hit_a_chunk_are_recomputed_and_answers_decoded_densely() -> None:
    method = METHODS["samkv-guided"]
    assert method.recompute == GuidedRecompute(first=24, share=0.0625, hits=1.0, small_context=128)
    assert method.select == GuidedSelect(window=64, long=192)
    assert (module.BEFORE, module.AFTER, module.SINKS) == (8, 1, 4)
    assert method.update is overwrite and method.positions == "global" and method.attend is None
    assert all(method.eviction is None for method in METHODS.values())


@pytest.mark.parametrize("paper", ["2410.15332", "2503.08879", "A3"])
def test_the_papers_that_it_takes_from_are_named(paper: str) -> None:
    assert module.__doc__ is not None and paper in module.__doc__


@pytest.mark.parametrize(
    ("part", "option", "value", "allowed"),
    [
        (GuidedSelect, "window", 0, "at least 1"),
        (GuidedSelect, "window", -3, "at least 1"),
        (GuidedSelect, "long", -1, "0 or more"),
        (GuidedRecompute, "share", -0.1, "between 0 and 1"),
        (GuidedRecompute, "share", 2, "between 0 and 1"),
        (GuidedRecompute, "share", math.nan, "between 0 and 1"),
        (GuidedRecompute, "hits", -0.5, "0 or more"),
        (GuidedRecompute, "hits", math.nan, "0 or more"),
        (GuidedRecompute, "hits", math.inf, "0 or more"),
        (GuidedRecompute, "first", -3, "0 or more"),
        (GuidedRecompute, "small_context", -1, "0 or more"),
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
    assert len([line for line in lines if line.strip()]) <= 120
    assert len(option_names(METHODS["samkv-guided"])) <= 6
