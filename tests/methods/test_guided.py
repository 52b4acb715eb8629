"""The guided recomputation: which segments match a question, worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from unittest.mock import patch

import numpy as np
import pytest

from samkv_integrations.methods import guided as module
from samkv_integrations.methods.guided import GuidedRecompute, matching_segments
from samkv_integrations.prompt.layout import ChunkPart, Layout, Run
from samkv_integrations.store.chunk import BlockScheme
from tests.support.layouts import layout_of


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
    layout = Layout([*ids, *map(ord, question)], parts, ())
    free = np.zeros(layout.n_context, np.bool_)
    return set(np.flatnonzero(matching_segments(layout, 4, most, free)).tolist())


def test_rarer_words_match_better_and_so_do_chunks_that_hold_more_of_them() -> None:
    """One segment of four tokens has room: the letter r is in three of them, q in one."""
    chunks = ["r...r...r...", "q......."]
    assert matched(chunks, "rq", most=4) == set(range(12, 16))
    assert matched(chunks, "rrqr", most=4) == set(range(12, 16))  # neither order nor number counts
    assert matched(chunks, "rq", most=3) == set()
    # alike but for the rest of their chunks
    assert matched(["r.......", "r...q..."], "rq", most=8) == set(range(8, 16))
    assert matched(["r...", "...."], "x", most=1000) == set()


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


def tokens_of(layout: Layout, most: int = 1, **options: int) -> set[int]:
    """Those chosen, as by default neither first tokens nor matching segments.

    most: the part of the context that may match is one in so many.
    """
    part = GuidedRecompute(**({"first": 0, "matched": 0} | options))
    with patch.object(module, "MOST_MATCHED", most):
        return set(np.flatnonzero(part.choose(layout)).tolist())


def holding(layout: Layout, *tokens: int) -> Layout:
    """The same prompt, these tokens of whose context are the question's."""
    ids = layout.token_ids.copy()
    ids[layout.context_positions[list(tokens)]] = 5
    asked = copy(layout)
    asked.token_ids = ids
    return asked


def test_first_tokens_are_a_count_of_each_chunk() -> None:
    layout = layout_of((128, 40, 10), before=1)
    assert tokens_of(layout, first=3) == {*range(3), *range(128, 131), *range(168, 171)}
    assert tokens_of(layout, first=12) == {*range(12), *range(128, 140), *range(168, 178)}


def test_segments_of_32_tokens_that_match_the_question_are_computed_again() -> None:
    """Chunks of 100 and 40 tokens, of which tokens 70 and 139 match."""
    layout = layout_of((100, 40), before=1)
    assert tokens_of(layout, matched=1000) == set()  # nothing in common yet
    layout = holding(layout, 70, 139)
    third, last = set(range(64, 96)), set(range(132, 140))
    assert tokens_of(layout, matched=1000) == third | last
    assert tokens_of(layout, matched=40) == third | last
    assert tokens_of(layout, matched=39) == third
    assert tokens_of(layout, matched=31) == set()
    assert tokens_of(layout, matched=0) == set()
    assert tokens_of(layout, first=1, matched=39) == {0, 100} | third


def test_what_matches_in_an_exact_chunk_is_not_computed_again() -> None:
    layout = holding(layout_of((60, 40)), 10, 70)
    assert layout.exact.tolist() == [True, False]
    assert tokens_of(layout, matched=1000) == set(range(60, 92))


@pytest.mark.parametrize(("lengths", "expected"), [((100, 91), set()), ((100, 92), {*range(32)})])
def test_what_matches_is_a_sixth_of_the_context_at_most(
    lengths: tuple[int, ...], expected: set[int]
) -> None:
    layout = holding(layout_of(lengths, before=1), 5)
    assert tokens_of(layout, module.MOST_MATCHED, matched=96) == expected
