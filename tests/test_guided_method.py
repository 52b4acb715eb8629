"""The guided selection and recomputation against loops over plain Python numbers.

Scores are compared within 1e-4 of the largest: logits are sums of at most 100 in all, each part
rounded a few times to float32 (6e-8), and a softmax passes on at most the error of its logits. A
wrong head, position or chunk changes scores by tenths. Choices are then followed from the scores
themselves, whose values both sides share to the bit, so they must be the same block for block;
equal scores (blocks that share a hit) go to the earlier block.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from samkv_integrations.errors import InvalidOption
from samkv_integrations.layout import Selection
from samkv_integrations.methods import METHODS
from samkv_integrations.methods.guided import Blocks, GuidedRecompute, GuidedSelect
from samkv_integrations.methods.parts import Evidence, Fusion
from tests.evidence import Block, Request, Shape, as_stored, request_of, shapes

MANY = settings(max_examples=100, deadline=None)
FEW = settings(max_examples=40, deadline=None)
Vector = list[float]


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def turn(x: Vector, cos: Vector, sin: Vector) -> Vector:
    """``x`` rotated: its two halves are the two coordinates of each plane."""
    half = len(x) // 2
    first = [x[i] * cos[i] - x[i + half] * sin[i] for i in range(half)]
    second = [x[i + half] * cos[i + half] + x[i] * sin[i + half] for i in range(half)]
    return first + second


def personal(asking: list[Vector], local: list[list[Vector]], chunk: int) -> list[Vector]:
    """Equation 1 of SamKV for one chunk and one asking row, all (H, D)."""
    whole = [x for head in asking for x in head]
    out = [list(head) for head in asking]
    others = [other for j, other in enumerate(local) if j != chunk]
    for other in others:
        flat = [x for head in other for x in head]
        cosine = dot(whole, flat) / math.sqrt(dot(whole, whole) * dot(flat, flat))
        for h, head in enumerate(other):
            out[h] = [a + abs(cosine) * b / len(others) for a, b in zip(out[h], head, strict=True)]
    return out


def loop_scores(request: Request, select: GuidedSelect) -> list[Vector]:
    """[layer][token]: softmax per head over all chunks' tokens, summed over heads, mean of rows."""
    shape, evidence = request.shape, request.evidence
    tokens = range(request.n_context)
    block_of = [b for b in request.blocks for _ in range(b.start, b.stop)]
    cos, sin = evidence.context_cos.tolist(), evidence.context_sin.tolist()
    ask_cos, ask_sin = evidence.question_cos.tolist(), evidence.question_sin.tolist()
    n_heads = shape.groups * shape.heads
    scores = []
    for layer in range(shape.n_layers):
        if select.score == "keys":
            keys = evidence.keys[layer].tolist()
        else:
            means = evidence.summaries[layer].tolist()
            keys = [means[block_of[t].index] for t in tokens]
        if select.rotated:
            keys = [[turn(k, cos[t], sin[t]) for k in keys[t]] for t in tokens]
        total = [0.0] * request.n_context
        for row in range(shape.window):
            asking = request.queries[layer, :, row].tolist()
            of_chunk = [asking] * len(shape.lengths)
            if select.bias:
                local = evidence.local_query[layer].tolist()
                of_chunk = [personal(asking, local, c) for c in range(len(shape.lengths))]
            if select.rotated:
                of_chunk = [
                    [turn(head, ask_cos[row], ask_sin[row]) for head in chunk] for chunk in of_chunk
                ]
            for h in range(n_heads):
                logits = [
                    dot(of_chunk[block_of[t].chunk][h], keys[t][h // shape.heads])
                    / math.sqrt(shape.dim)
                    for t in tokens
                ]
                top = max(logits)
                weights = [math.exp(x - top) for x in logits]
                for t in tokens:
                    total[t] += weights[t] / sum(weights) / shape.window
        scores.append(total)
    return scores


def budget_of(request: Request, select: GuidedSelect) -> float:
    return max(select.max_kept_ratio * request.n_context, select.min_tokens)


def loop_blocks(
    request: Request, scores: Vector, select: GuidedSelect, always: set[int]
) -> set[int]:
    """Blocks filled into the budget by the best token of each, ``always`` first."""
    spread = []
    for token in range(request.n_context):
        chunk = request.chunk_of(token)
        before = range(max(0, token - select.after), token + 1)
        spread.append(max(scores[t] for t in before if request.chunk_of(t) == chunk))
    best = [max(spread[b.start : b.stop]) for b in request.blocks]
    room = budget_of(request, select) - n_tokens(request, always)
    keep = set(always)
    for block in sorted(request.blocks, key=lambda b: (-best[b.index], b.index)):
        if block.index in keep:
            continue
        room -= block.stop - block.start
        if room < 0:
            break
        keep.add(block.index)
    return keep


def named(request: Request, blocks: Blocks) -> set[int]:
    def wanted(block: Block) -> bool:
        return {"none": False, "initial": block.initial, "anchors": block.anchor}[blocks]

    return {b.index for b in request.blocks if wanted(b)}


def n_tokens(request: Request, blocks: set[int]) -> int:
    return sum(request.blocks[i].stop - request.blocks[i].start for i in blocks)


def sets(mask: Tensor) -> list[set[int]]:
    return [set(row.nonzero()[:, 0].tolist()) for row in mask]


def assert_scores(actual: Tensor, expected: list[Vector]) -> None:
    wanted = torch.tensor(expected)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-4 * float(wanted.max()))


selects = st.builds(
    GuidedSelect,
    max_kept_ratio=st.floats(0, 1),
    min_tokens=st.integers(0, 30),
    window=st.none(),
    probe=st.just("probe"),
    always=st.sampled_from(("none", "initial", "anchors")),
    score=st.sampled_from(("keys", "summaries")),
    after=st.integers(0, 5),
    rotated=st.booleans(),
    shared=st.booleans(),
)


# --- selection ---------------------------------------------------------------------------------


@MANY
@given(shapes(), selects)
def test_the_choice_is_that_of_the_loops(shape: Shape, select: GuidedSelect) -> None:
    request = as_stored(request_of(shape))
    always = named(request, select.always)
    assume(n_tokens(request, always) <= budget_of(request, select))
    chosen = select.choose(request.queries, request.evidence, request.layout)
    assert chosen.keep.shape == (shape.n_layers, len(request.blocks))
    assert chosen.keep.device.type == "cpu"
    assert_scores(chosen.token_scores, loop_scores(request, select))
    if select.shared:
        together = chosen.token_scores.sum(0).tolist()
        expected = [loop_blocks(request, together, select, always)] * shape.n_layers
    else:
        expected = [
            loop_blocks(request, scores, select, always) for scores in chosen.token_scores.tolist()
        ]
    assert sets(chosen.keep) == expected


@MANY
@given(shapes(), st.sampled_from(("keys", "summaries")))
def test_bias_is_equation_1_on_every_asking_row(shape: Shape, score: str) -> None:
    request = as_stored(request_of(shape))
    select = GuidedSelect(probe="probe", window=None, score=score, bias=True, rotated=False)
    chosen = select.choose(request.queries, request.evidence, request.layout)
    assert_scores(chosen.token_scores, loop_scores(request, select))


@FEW
@given(shapes())
def test_bias_at_true_positions_turns_the_personalised_query(shape: Shape) -> None:
    """Local queries are stored without a position. Equation 1 adds them to the asking row before
    either is rotated, else two frames are mixed and the bias changes with the prompt's length."""
    request = as_stored(request_of(shape))
    select = GuidedSelect(probe="probe", window=None, bias=True, rotated=True)
    chosen = select.choose(request.queries, request.evidence, request.layout)
    assert_scores(chosen.token_scores, loop_scores(request, select))


@pytest.mark.parametrize("blocks", ["initial", "anchors"])
def test_always_kept_blocks_stay_when_they_alone_exceed_the_budget(blocks: Blocks) -> None:
    request = as_stored(request_of(Shape(seed=7, lengths=(30, 18, 26, 4))))
    select = GuidedSelect(probe="probe", always=blocks, max_kept_ratio=0.1, min_tokens=0)
    always = named(request, blocks)
    assert n_tokens(request, always) > 0.1 * request.n_context
    chosen = select.choose(request.queries, request.evidence, request.layout)
    assert sets(chosen.keep) == [always, always]


@pytest.mark.parametrize(
    ("ratio", "min_tokens", "blocks"),
    [(0.0, 0, 0), (0.0, 3, 0), (0.0, 4, 1), (0.5, 0, 5), (0.5, 23, 5), (0.5, 24, 6), (0.1, 99, 10)],
)
def test_the_budget_is_the_larger_of_share_and_tokens(
    ratio: float, min_tokens: int, blocks: int
) -> None:
    """Forty tokens in ten blocks of 4."""
    request = as_stored(request_of(Shape(seed=8, lengths=(24, 16))))
    select = GuidedSelect(probe="probe", max_kept_ratio=ratio, min_tokens=min_tokens)
    chosen = select.choose(request.queries, request.evidence, request.layout)
    assert chosen.keep.sum(1).tolist() == [blocks, blocks]


def test_a_hit_is_shared_with_the_tokens_after_it_in_its_own_chunk_only() -> None:
    """Worked out by hand: blocks of 4, a hit at token 7 (the end of block 1 of 0 to 5), another at
    token 19 (the last of the first chunk)."""
    request = as_stored(request_of(Shape(seed=9, lengths=(20, 20), n_layers=1)))
    scores = torch.full((1, 40), 0.01)
    scores[0, 7], scores[0, 19] = 0.9, 0.8

    def kept(after: int, ratio: float) -> set[int]:
        class Given(GuidedSelect):
            def _token_scores(self, *_: object) -> Tensor:
                return scores

        select = Given(probe="probe", after=after, max_kept_ratio=ratio, min_tokens=0)
        return sets(select.choose(request.queries, request.evidence, request.layout).keep)[0]

    assert kept(0, 0.2) == {1, 4}
    assert kept(1, 0.2) == {1, 2}  # token 8 shares the score of token 7
    assert kept(4, 0.3) == {1, 2, 4}  # token 20 is of another chunk
    assert kept(5, 0.4) == {1, 2, 3, 4}  # tokens 8 to 12


@FEW
@given(shapes(), selects)
def test_layer_by_layer_equals_all_at_once(shape: Shape, select: GuidedSelect) -> None:
    """Given the same queries. This is how the engine calls a layerwise selection."""
    select = replace(select, shared=False, probe="layerwise")
    request = as_stored(request_of(shape))
    at_once = select.choose(request.queries, request.evidence, request.layout)
    for layer in range(shape.n_layers):
        one = select.choose(
            request.queries[layer : layer + 1], request.evidence.layer(layer), request.layout
        )
        assert one.keep.shape == (1, len(request.blocks))
        assert torch.equal(one.keep[0], at_once.keep[layer])
        torch.testing.assert_close(one.token_scores[0], at_once.token_scores[layer])


def test_the_evidence_of_a_layer_is_that_layer_s_alone() -> None:
    evidence = request_of(Shape(seed=10, lengths=(30, 20), n_layers=3)).evidence
    one = evidence.layer(1)
    assert one.n_layers == 1
    for name in Evidence.PER_LAYER:
        assert torch.equal(getattr(one, name), getattr(evidence, name)[1:2]), name
    assert torch.equal(one.context_cos, evidence.context_cos)


@FEW
@given(shapes(), selects)
def test_the_choice_is_pure(shape: Shape, select: GuidedSelect) -> None:
    request = as_stored(request_of(shape))
    before = {k: v.clone() for k, v in vars(request.evidence).items() if isinstance(v, Tensor)}
    queries = request.queries.clone()
    once = select.choose(request.queries, request.evidence, request.layout).keep.clone()
    again = select.choose(request.queries, request.evidence, request.layout).keep
    assert torch.equal(once, again) and torch.equal(queries, request.queries)
    for name, value in before.items():
        assert torch.equal(value, getattr(request.evidence, name)), name


@pytest.mark.parametrize(
    "changes",
    [{"rotated": False}, {"score": "summaries"}, {"after": 0}, {"shared": True}, {"bias": True}],
    ids=str,
)
def test_every_option_matters_to_the_choice(changes: dict[str, Any]) -> None:
    """Otherwise the comparisons above could not fail."""
    base = GuidedSelect(probe="probe", rotated=not changes.get("bias", False), min_tokens=0)
    differ = 0
    for seed in range(20):
        request = as_stored(request_of(Shape(seed=seed, lengths=(40, 30, 45), window=1)))
        keeps = [
            select.choose(request.queries, request.evidence, request.layout).keep
            for select in (base, replace(base, **changes))
        ]
        differ += not torch.equal(*keeps)
    assert differ >= 8


def test_what_is_read_follows_the_options() -> None:
    assert GuidedSelect().reads == {"keys"}
    assert GuidedSelect(bias=True).reads == {"keys", "local_query"}
    assert GuidedSelect(score="summaries").reads == {"summaries", "anchor_summaries"}
    assert GuidedRecompute(ratio=0.5, heads=4).reads == frozenset()


@pytest.mark.parametrize("blocks", ["none", "initial", "anchors"])
def test_the_probe_reads_the_blocks_it_names(blocks: Blocks) -> None:
    request = request_of(Shape(seed=11, lengths=(30, 7, 12)))
    probed = GuidedSelect(probe="probe", probe_over=blocks).probe_blocks(request.layout)
    assert set(probed.nonzero()[:, 0].tolist()) == named(request, blocks)


# --- recomputation -----------------------------------------------------------------------------


def loop_rows(
    request: Request, keep: Tensor, scores: Tensor, ratio: float, heads: int
) -> tuple[set[int], set[int], int]:
    """(first tokens of chunks that may be taken, the best others in order, the budget)."""
    first, others = [], []
    for block in request.blocks:
        start = sum(request.shape.lengths[: block.chunk])
        layers = [n for n in range(request.shape.n_layers) if bool(keep[n, block.index])]
        if request.exact[block.chunk] or not layers:
            continue
        for token in range(block.start, block.stop):
            if token - start < heads:
                first.append(token)
            else:
                others.append((-sum(float(scores[n, token]) for n in layers), token))
    budget = int(ratio * request.n_context)
    best = [token for _, token in sorted(others)][: max(0, budget - len(first))]
    return set(first), set(best), budget


@MANY
@given(shapes(), st.floats(0, 1), st.integers(0, 6))
def test_recomputed_rows_are_those_of_the_loops(shape: Shape, ratio: float, heads: int) -> None:
    assume(ratio or not heads)  # heads without a ratio are refused
    request = request_of(shape)
    generator = torch.Generator().manual_seed(shape.seed + 1)
    keep = torch.rand(shape.n_layers, len(request.blocks), generator=generator) < 0.5
    scores = torch.rand(shape.n_layers, request.n_context, generator=generator, dtype=torch.float64)
    selection = Selection(keep=keep, token_scores=scores)
    rows = GuidedRecompute(ratio=ratio, heads=heads).rows(
        selection, request.evidence, request.layout
    )
    assert rows.dtype == torch.bool and rows.shape == (shape.n_layers, request.n_context)
    taken = set(rows.any(0).nonzero()[:, 0].tolist())
    first, best, budget = loop_rows(request, keep, scores, ratio, heads)
    if len(first) > budget:  # which of the first tokens is left open
        assert taken <= first and len(taken) == budget
    else:
        assert taken == first | best
    for layer in range(shape.n_layers):
        kept = {
            t for b in request.blocks if bool(keep[layer, b.index]) for t in range(b.start, b.stop)
        }
        assert set(rows[layer].nonzero()[:, 0].tolist()) == taken & kept


def test_nothing_is_recomputed_by_default() -> None:
    method = METHODS["samkv-guided"]
    assert method.recompute == GuidedRecompute(ratio=0.0, heads=0)
    request = as_stored(request_of(Shape(seed=12, lengths=(30, 20))))
    chosen = method.select.choose(
        request.queries[:1, :, -1:],
        replace(
            request.evidence.layer(0),
            question_cos=request.evidence.question_cos[-1:],
            question_sin=request.evidence.question_sin[-1:],
        ),
        request.layout,
    )
    rows = method.recompute.rows(chosen, request.evidence, request.layout)
    assert rows.shape == (1, request.n_context) and not bool(rows.any())


# --- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "option", "value", "allowed"),
    [
        (GuidedSelect, "max_kept_ratio", -0.1, "between 0 and 1"),
        (GuidedSelect, "max_kept_ratio", 1.1, "between 0 and 1"),
        (GuidedSelect, "max_kept_ratio", math.nan, "between 0 and 1"),
        (GuidedSelect, "max_kept_ratio", None, "between 0 and 1"),
        (GuidedSelect, "window", 0, "at least 1"),
        (GuidedSelect, "window", -3, "at least 1"),
        (GuidedSelect, "probe", "none", "probe, layerwise"),
        (GuidedSelect, "probe", "Probe", "probe, layerwise"),
        (GuidedSelect, "probe_over", "all", "none, initial, anchors"),
        (GuidedSelect, "always", "local", "none, initial, anchors"),
        (GuidedSelect, "score", "values", "keys, summaries"),
        (GuidedSelect, "after", -1, "0 or more"),
        (GuidedSelect, "min_tokens", -1, "0 or more"),
        (GuidedSelect, "shared", True, "probe='probe'"),
        (GuidedRecompute, "ratio", -0.1, "between 0 and 1"),
        (GuidedRecompute, "ratio", 2, "between 0 and 1"),
        (GuidedRecompute, "ratio", None, "between 0 and 1"),
        (GuidedRecompute, "heads", -1, "0 or more"),
        (GuidedRecompute, "heads", 4, "needs a ratio"),
        (GuidedSelect, "probe_over", "anchors", "needs probe='probe'"),
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
