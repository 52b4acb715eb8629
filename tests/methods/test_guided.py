"""The guided recomputation against loops over plain Python numbers.

How well a segment matches is a sum of a few logarithms, less than 100 in all, so 1e-4 is far above
rounding. Sums that are equal on paper may differ by rounding. So a choice of segments need not be
the loop's own: it must be one that takes the best first, for scores this near.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from samkv_integrations.cache.chunk import BlockScheme
from samkv_integrations.errors import InvalidOption
from samkv_integrations.methods import METHODS
from samkv_integrations.methods import guided as module
from samkv_integrations.methods.base import SelectAll, overwrite
from samkv_integrations.methods.guided import GuidedRecompute, matching_segments
from samkv_integrations.methods.samkv import Fusion
from samkv_integrations.prompt.layout import ChunkPart, Layout, Run
from tests.support.selection_inputs import Request, Shape, request_of, shapes

MANY = settings(max_examples=100, deadline=None)
FEW = settings(max_examples=40, deadline=None)
NEAR = 1e-4
Place = tuple[int, int]
"""A segment: its chunk, and which of its chunk's segments it is."""


def sets(mask: Tensor) -> list[set[int]]:
    return [set(row.nonzero()[:, 0].tolist()) for row in mask]


def with_words(request: Request, n_words: int) -> Request:
    """The same request of other token ids, of ``n_words`` in all; some are common, some rare."""
    rng = random.Random(f"words of {request.shape.seed}")
    ids = [int(n_words * rng.random() ** 2) for _ in range(request.layout.n_tokens)]
    return replace(request, layout=replace(request.layout, token_ids=torch.tensor(ids)))


def asking(**fixed: object) -> st.SearchStrategy[Request]:
    """Requests with questions of up to 12 tokens, none of them at times, and few or many words."""
    return st.builds(
        lambda shape, window, n_words: with_words(
            request_of(replace(shape, window=window)), n_words
        ),
        shapes(**fixed),
        st.integers(0, 12),
        st.sampled_from((1, 2, 4, 10, 40, 200)),
    )


def loop_segments(request: Request, size: int) -> dict[Place, list[int]]:
    """The context tokens of each segment: they are counted from the chunk's own first token."""
    segments: dict[Place, list[int]] = {}
    for chunk, (tokens, offsets) in enumerate(zip(request.spans, request.held, strict=True)):
        for t, offset in zip(tokens, offsets, strict=True):
            segments.setdefault((chunk, offset // size), []).append(t)
    return segments


def loop_matches(request: Request, segments: dict[Place, list[int]]) -> dict[Place, float]:
    """How well each segment matches that shares a token with the question."""
    ids = request.layout.token_ids.tolist()
    asked = set(ids[-max(1, request.shape.window) :])  # the last token if there is no question
    words = {
        place: {ids[request.positions[t]] for t in tokens} & asked
        for place, tokens in segments.items()
    }

    def rarities(of: set[int]) -> float:
        n_holding = [sum(word in held for held in words.values()) for word in of]
        return math.fsum(math.log((len(words) + 1) / (n + 0.5)) for n in n_holding)

    matches = {}
    for (chunk, index), own in words.items():
        together = {word for (other, _), held in words.items() if other == chunk for word in held}
        if own:
            matches[chunk, index] = rarities(own) + rarities(together) / 2
    return matches


def assert_the_best_match(
    request: Request, found: set[int], size: int, most: int, given: set[int]
) -> None:
    """``found`` are whole segments, the best until the next one would be more than ``most``.

    Tokens in ``given`` do not count.
    """
    segments = loop_segments(request, size)
    matches = loop_matches(request, segments)
    chosen = {place for place, tokens in segments.items() if found.intersection(tokens)}
    assert found == {t for place in chosen for t in segments[place]}
    assert chosen <= matches.keys() and len(found - given) <= most
    left = matches.keys() - chosen
    if left:
        best = max(matches[place] for place in left)
        assert all(matches[place] > best - NEAR for place in chosen)
        next_ones = [place for place in left if matches[place] > best - NEAR]
        assert any(len({*found, *segments[place]} - given) > most for place in next_ones)


def some(request: Request, share: float) -> torch.Tensor:
    """(Tctx,) bool: about a share of the context's tokens."""
    generator = torch.Generator().manual_seed(request.shape.seed + 2)
    return torch.rand(request.n_context, generator=generator) < share


@MANY
@given(asking(), st.integers(1, 40), st.integers(0, 200), st.floats(0, 1))
def test_segments_that_match_are_those_of_the_loop(
    request: Request, size: int, most: int, share: float
) -> None:
    free = some(request, share)
    mask = matching_segments(request.layout, size, most, free)
    assert mask.shape == (request.n_context,)
    assert mask.dtype == torch.bool and mask.device.type == "cpu"
    found, given = sets(torch.stack((mask, free)))
    assert_the_best_match(request, found, size, most, given)


@FEW
@given(asking(), st.integers(1, 40), st.integers(0, 200), st.integers(0, 200))
def test_a_larger_budget_takes_nothing_back(
    request: Request, size: int, most: int, more: int
) -> None:
    free = some(request, 0.2)
    few, many, none = (
        matching_segments(request.layout, size, budget, free) for budget in (most, most + more, 0)
    )
    assert bool((many | ~few).all())
    assert bool((free | ~none).all())


@FEW
@given(asking(), st.integers(1, 40), st.integers(0, 200))
def test_neither_order_nor_repetition_in_the_question_counts(
    request: Request, size: int, most: int
) -> None:
    layout, n_asked = request.layout, max(1, request.shape.window)
    ids = layout.token_ids.tolist()
    turned = torch.tensor([*ids, *reversed(ids[-n_asked:])])
    again = replace(
        layout,
        token_ids=turned,
        question=torch.cat((layout.question, layout.n_tokens + torch.arange(n_asked))),
    )
    free = some(request, 0.2)
    before = matching_segments(layout, size, most, free)
    assert torch.equal(matching_segments(again, size, most, free), before)


def matched(
    chunks: Sequence[str],
    question: str,
    *,
    most: int,
    held: Sequence[Sequence[range]] | None = None,
) -> set[int]:
    """Context tokens that match, in segments of four: a token is a letter, a dot one like others.

    held: of each chunk, the runs of it that the prompt holds; all of it if not given.
    """
    scheme, ids, parts = BlockScheme(size=4, n_init=1, n_local=1), [ord("<")], []
    for chunk, runs in zip(chunks, held or [[range(len(c))] for c in chunks], strict=True):
        placed = []
        for run in runs:
            ids.append(ord("|"))  # text between
            placed.append(Run(len(ids), run.start, run.stop))
            ids += map(ord, chunk[run.start : run.stop])
        parts.append(ChunkPart(runs=tuple(placed), blocks=scheme.of(len(chunk))))
    layout = Layout.of([*ids, *map(ord, question)], parts, ())
    free = torch.zeros(layout.n_context, dtype=torch.bool)
    (found,) = sets(matching_segments(layout, 4, most, free)[None])
    return found


def test_of_a_chunk_held_in_part_there_are_segments_of_the_part() -> None:
    """They begin where those of the whole chunk do, and hold what the prompt holds of them."""
    chunk = "..r........."
    assert matched([chunk], "r", most=1000, held=[[range(2, 6)]]) == {0, 1}
    assert matched([chunk], "r", most=1000, held=[[range(0, 3)]]) == {0, 1, 2}
    # what the prompt does not hold is not there to match
    assert matched([chunk], "r", most=1000, held=[[range(3, 12)]]) == set()
    # two runs of one segment, with text between
    assert matched([chunk], "r", most=1000, held=[[range(0, 1), range(2, 6)]]) == {0, 1, 2}
    assert matched([chunk], "r", most=2, held=[[range(0, 1), range(2, 6)]]) == set()
    # nor does it count for the chunk: without its q it is like the other one
    chunks, whole = ["r.......", "r...q..."], range(8)
    assert matched(chunks, "rq", most=4, held=[[whole], [range(4)]]) == {0, 1, 2, 3}
    assert matched(chunks, "rq", most=8, held=[[whole], [whole]]) == set(range(8, 16))


def test_of_a_prompt_that_ends_with_a_chunk_the_last_token_is_the_question() -> None:
    assert matched(["..z.", "....", "x.y....z"], "", most=1000) == {0, 1, 2, 3, 12, 13, 14, 15}


@FEW
@given(asking())
def test_the_choice_is_pure(request: Request) -> None:
    ids, part = request.layout.token_ids.clone(), GuidedRecompute(first=3)
    chosen = SelectAll().choose(None, request.inputs, request.layout)
    keep = chosen.keep.clone()
    rows = part.choose(chosen, request.inputs, request.layout)
    assert torch.equal(part.choose(chosen, request.inputs, request.layout), rows)
    assert torch.equal(ids, request.layout.token_ids) and torch.equal(keep, chosen.keep)


def loop_tokens(request: Request, matches: set[int], part: GuidedRecompute) -> set[int]:
    """The tokens computed again, none of what is given anyway: first ones of each chunk, and those
    of matching segments.

    matches: tokens of the segments, which several choices may be right for.
    """
    closed = {t for t in range(request.n_context) if request.exact[request.chunk_of(t)]}
    if not request.shape.window:  # the prompt ends with a chunk
        closed.add(request.n_context - 1)
    found = set(matches)
    for of_chunk, offsets in zip(request.spans, request.held, strict=True):
        found |= {t for t, o in zip(of_chunk, offsets, strict=True) if o < part.first}
    return found - closed


@MANY
@given(asking(), st.integers(0, 20), st.integers(0, 120), st.integers(1, 32))
def test_recomputed_tokens_are_those_of_the_loop(
    request: Request, first: int, most: int, size: int
) -> None:
    part, layout = GuidedRecompute(first=first, matched=most), request.layout
    free = layout.exact[layout.chunk_of_token] | layout.uncached[layout.context_positions]
    free |= layout.offset_in_chunk < first
    matches, free_tokens = sets(torch.stack((matching_segments(layout, size, most, free), free)))
    assert_the_best_match(request, matches, size, most, free_tokens)
    with patch.multiple(module, SEGMENT=size, MOST_MATCHED=1):
        rows = rows_of(part, request)
    assert sets(rows) == [loop_tokens(request, matches, part)] * request.shape.n_layers
    assert rows.dtype == torch.bool and rows.device.type == "cpu"


def rows_of(part: GuidedRecompute, request: Request) -> Tensor:
    """(L, Tctx) bool, what it chooses where everything is kept."""
    everything = SelectAll().choose(None, request.inputs, request.layout)
    return part.choose(everything, request.inputs, request.layout)


def tokens_of(request: Request, **options: int) -> set[int]:
    """Those chosen, as by default neither first tokens nor matching segments."""
    part = GuidedRecompute(**({"first": 0, "matched": 0} | options))
    with patch.object(module, "MOST_MATCHED", 1):
        rows = rows_of(part, request)
    assert bool((rows == rows[0]).all())
    return sets(rows)[0]


def test_first_tokens_are_a_count_of_each_chunk() -> None:
    """Worked out by hand: chunks of 128, 40 and 10 tokens."""
    request = request_of(Shape(seed=17, lengths=(128, 40, 10), n_layers=2, before=1))
    expected = {*range(3), *range(128, 131), *range(168, 171)}
    assert tokens_of(request, first=3) == expected
    assert tokens_of(request, first=12) == {*range(12), *range(128, 140), *range(168, 178)}


def holding(request: Request, words: dict[int, int]) -> Request:
    """The same request with other token ids at these context tokens; the question's id is 5."""
    ids = request.layout.token_ids.clone()
    for token, word in words.items():
        ids[request.positions[token]] = word
    return replace(request, layout=replace(request.layout, token_ids=ids))


def test_segments_of_32_tokens_that_match_the_question_are_computed_again() -> None:
    """Worked out by hand: chunks of 100 and 40 tokens, of which tokens 70 and 139 match."""
    request = request_of(Shape(seed=17, lengths=(100, 40), n_layers=2, before=1))
    assert tokens_of(request, matched=1000) == set()  # nothing in common yet
    request = holding(request, {70: 5, 139: 5})
    third, last = set(range(64, 96)), set(range(132, 140))
    assert tokens_of(request, matched=1000) == third | last
    assert tokens_of(request, matched=40) == third | last
    assert tokens_of(request, matched=39) == third
    assert tokens_of(request, matched=31) == set()
    assert tokens_of(request, matched=0) == set()
    assert tokens_of(request, first=1, matched=39) == {0, 100} | third


def test_what_matches_in_an_exact_chunk_is_not_computed_again() -> None:
    request = request_of(Shape(seed=16, lengths=(60, 40), n_layers=4))
    assert request.exact == [True, False]
    request = holding(request, {10: 5, 70: 5})
    assert tokens_of(request, matched=1000) == set(range(60, 92))


@pytest.mark.parametrize("first", [0, 3, 20, 60])
@pytest.mark.parametrize("most", [0, 20, 40, 1000])
@pytest.mark.parametrize("n_words", [2, 40])
def test_estimates_weigh_no_less_than_what_is_recomputed(
    first: int, most: int, n_words: int
) -> None:
    request = request_of(Shape(seed=16, lengths=(40, 40, 40), n_layers=2, before=1, window=8))
    request = with_words(request, n_words)
    assert bool(matching_segments(request.layout, module.SEGMENT, 1000, some(request, 0)).any())
    part = GuidedRecompute(first=first, matched=most)
    computed = float(rows_of(part, request).double().mean())
    weighed = part.most_ratio(120, 3)
    assert computed <= weighed + 1e-6 and weighed <= 1
    if not most:  # segments need not use up what they may
        assert computed == pytest.approx(weighed)


def test_what_estimates_weigh_is_of_chunks_and_of_the_prompt() -> None:
    """First tokens are a chunk's, and matching segments the whole prompt's."""
    part = GuidedRecompute(first=4, matched=20)
    assert part.most_ratio(200, 3) == pytest.approx((3 * 4 + 20) / 200)
    assert part.most_ratio(12, 3) == 1.0


@pytest.mark.parametrize(("lengths", "expected"), [((100, 91), set()), ((100, 92), {*range(32)})])
def test_what_matches_is_a_sixth_of_the_context_at_most(
    lengths: tuple[int, ...], expected: set[int]
) -> None:
    request = holding(request_of(Shape(seed=17, lengths=lengths, n_layers=1, before=1)), {5: 5})
    assert sets(rows_of(GuidedRecompute(first=0), request)) == [expected]


def test_small_contexts_are_computed_whole() -> None:
    assert GuidedRecompute().whole_tokens == 128
    assert GuidedRecompute(small_context=7).whole_tokens == 7


# --- the method --------------------------------------------------------------------------------


def test_first_tokens_and_what_matches_are_recomputed_and_answers_decoded_densely() -> None:
    method = METHODS["samkv-guided"]
    assert method.recompute == GuidedRecompute(first=16, matched=96, small_context=128)
    assert method.select == SelectAll() and method.needs == frozenset()
    assert (module.SEGMENT, module.MOST_MATCHED) == (32, 6)
    assert method.update is overwrite and method.positions == "global" and method.attend is None
    assert all(method.eviction is None for method in METHODS.values())


@pytest.mark.parametrize(
    ("part", "option", "value", "allowed"),
    [
        (GuidedRecompute, "matched", -1, "0 or more"),
        (GuidedRecompute, "first", None, "whole number"),
        (GuidedRecompute, "first", 1.5, "whole number"),
        (GuidedRecompute, "matched", True, "whole number"),
        (GuidedRecompute, "matched", 10**30, "at most"),
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
