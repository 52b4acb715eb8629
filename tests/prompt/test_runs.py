"""Runs of token ids that prompts and chunks have in common, against a slow search for them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samkv_integrations.errors import StoreError
from samkv_integrations.prompt.layout import PromptChunk, Run, find_runs
from samkv_integrations.store.index import Entry, Index, IndexedChunks
from samkv_integrations.store.windows import MIN_RUN, ChunkIndex, Found, MemoryIndex, Windows
from tests.support.chunks import TINY
from tests.support.stores import Files

SECRET, DIGEST = b"s" * 32, TINY.digest
VOCABULARY = 49_152


def ids(seed: int, n: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(VOCABULARY) for _ in range(n)]


def memory(*chunks: Sequence[int]) -> MemoryIndex:
    index = MemoryIndex(SECRET)
    for number, chunk in enumerate(chunks):
        index.add(f"{number:032x}", chunk)
    return index


def on_disk(folder: Path, *chunks: Sequence[int]) -> ChunkIndex:
    index = Index(folder, Files(), SECRET)
    for number, chunk in enumerate(chunks):
        with index.keep(entry(number, chunk)):
            pass
    return IndexedChunks(index, "", DIGEST)


def entry(number: int, chunk: Sequence[int], namespace: str = "") -> Entry:
    return Entry(
        fingerprint=TINY, key=f"{number:032x}", namespace=namespace, text=f"text {number}",
        token_ids=chunk, n_bytes=1, used_at=0.0,
    )  # fmt: skip


def runs(found: Sequence[PromptChunk]) -> list[tuple[int, int, int, int]]:
    return [
        (int(each.key, 16), run.position, run.start, run.stop)
        for each in found
        for run in each.runs
    ]


def assert_equal_ids(prompt: Sequence[int], found: Sequence[PromptChunk]) -> None:
    """Every run is one, long enough, and no id of the prompt is in two of them."""
    taken: set[int] = set()
    for each in found:
        for run in each.runs:
            assert len(run) >= MIN_RUN and taken.isdisjoint(run.span)
            taken.update(run.span)
            assert list(prompt[run.position : run.span.stop]) == list(
                each.token_ids[run.start : run.stop]
            )
        for one, two in itertools.pairwise(each.runs):
            assert one.stop <= two.start and one.span.stop <= two.position


def covered(prompt: Sequence[int], chunks: Sequence[Sequence[int]]) -> set[int]:
    """Positions in any run of at least `MIN_RUN` ids that is a chunk's, found by comparing all."""
    found: set[int] = set()
    for chunk in chunks:
        pieces = {tuple(chunk[at : at + MIN_RUN]) for at in range(len(chunk) - MIN_RUN + 1)}
        for at in range(len(prompt) - MIN_RUN + 1):
            if tuple(prompt[at : at + MIN_RUN]) in pieces:
                found.update(range(at, at + MIN_RUN))
    return found


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 40])
def test_so_many_equal_ids(n: int, tmp_path: Path) -> None:
    chunk = ids(1, 40)
    prompt = [*ids(2, 9), *chunk[:n], *ids(3, 9)]
    expected = [(0, 9, 0, n)] if n >= MIN_RUN else []
    assert runs(find_runs(prompt, [memory(chunk)])) == expected
    assert runs(find_runs(prompt, [on_disk(tmp_path, chunk)])) == expected
    assert runs(find_runs(chunk[:n], [memory(chunk)])) == ([(0, 0, 0, n)] if expected else [])
    assert find_runs(prompt, [memory(chunk[:n])]) == [] or n >= MIN_RUN


@pytest.mark.parametrize("shift", [-40, -1, 40, 10**9])
def test_a_false_place_is_no_run(shift: int) -> None:
    """Whoever can write to the index, or damages it, may say that a chunk is anywhere."""

    class Forged(MemoryIndex):
        def find(self, hashes: Iterable[int]) -> Found:
            places, known = super().find(hashes)
            moved = {h: [(key, at + shift) for key, at in of] for h, of in places.items()}
            return moved, known

    chunk = ids(1, 40)
    index = Forged(b"secret")
    index.add("chunk", chunk)
    prompt = [*ids(2, 50), *chunk, *ids(3, 9)]
    assert_equal_ids(prompt, find_runs(prompt, [index]))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_finds_every_id_that_a_slow_search_finds(data: st.DataObject) -> None:
    """Chunks of random ids, of which a prompt holds parts, in any order, cut, changed, repeated."""
    chunks = [ids(seed, data.draw(st.integers(1, 90))) for seed in range(3)]
    prompt: list[int] = []
    for _ in range(data.draw(st.integers(0, 6))):
        chunk = data.draw(st.sampled_from(chunks))
        start = data.draw(st.integers(0, len(chunk)))
        prompt += chunk[start : data.draw(st.integers(start, len(chunk)))]
        prompt += ids(data.draw(st.integers(0, 99)), data.draw(st.integers(0, 3)))
    for at in data.draw(st.lists(st.integers(0, max(0, len(prompt) - 1)), max_size=3)):
        prompt[at : at + 1] = [7]
    found = find_runs(prompt, [memory(*chunks)])
    assert_equal_ids(prompt, found)
    in_runs = {at for each in found for run in each.runs for at in run.span}
    missed = covered(prompt, chunks) - in_runs
    # what overlaps the run of another chunk may leave a rest that is too short
    assert all(near(at, in_runs) for at in missed)


def near(at: int, taken: set[int]) -> bool:
    return any(other in taken for other in range(at - MIN_RUN, at + MIN_RUN))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 2), max_size=120),
    st.lists(st.lists(st.integers(0, 2), max_size=60), max_size=4),
)
def test_never_another_id(prompt: list[int], chunks: list[list[int]]) -> None:
    """Few different ids, so that nearly everything looks alike."""
    assert_equal_ids(prompt, find_runs(prompt, [memory(*chunks)]))


def test_a_chunk_that_holds_another_wins(tmp_path: Path) -> None:
    long = ids(1, 100)
    part = long[30:60]
    for index in (memory(part, long), on_disk(tmp_path, part, long)):
        assert runs(find_runs([5, *long, 6], [index])) == [(1, 1, 0, 100)]
        assert runs(find_runs([5, *part, 6], [index])) == [(0, 1, 0, 30)] or runs(
            find_runs([5, *part, 6], [index])
        ) == [(1, 1, 30, 60)]


def test_chunks_that_overlap_in_the_document_and_in_the_prompt() -> None:
    """As splitters make them: the second begins with the last ids of the first."""
    document = ids(1, 180)
    first, second = document[:100], document[80:]
    both = memory(first, second)
    assert runs(find_runs([*first, 3, *second], [both])) == [(0, 0, 0, 100), (1, 101, 0, 100)]
    assert runs(find_runs(document, [both])) == [(0, 0, 0, 100), (1, 100, 20, 100)]


def test_chunks_that_begin_alike(tmp_path: Path) -> None:
    head = ids(0, 50)
    chunks = [[*head, *ids(seed, 30)] for seed in range(1, 40)]
    for index in (memory(*chunks), on_disk(tmp_path, *chunks)):
        for number in (0, 20, 38):
            assert runs(find_runs(chunks[number], [index])) == [(number, 0, 0, 80)]


def test_lines_of_a_chunk_that_are_quoted_are_one_occurrence() -> None:
    chunk = ids(1, 100)
    prompt = [8, *chunk[:30], 8, *chunk[30:37], 8, *chunk[37:100], *ids(9, 4)]
    (found,) = find_runs(prompt, [memory(chunk)])
    assert found.runs == (Run(1, 0, 30), Run(40, 37, 100))
    assert found.token_ids == tuple(chunk)


@pytest.mark.parametrize("n", [1, 16, 20, 4000])
def test_a_chunk_of_one_token_repeated(n: int) -> None:
    index = memory([3] * n)
    for length in (15, 16, 20, 50, 8000):
        found = find_runs([3] * length, [index])
        assert_equal_ids([3] * length, found)
        assert bool(found) == (min(n, length) >= MIN_RUN)


def test_ids_at_the_ends_of_the_vocabulary(tmp_path: Path) -> None:
    chunk = [0, 2**31 - 1] * 20
    for index in (memory(chunk), on_disk(tmp_path, chunk)):
        assert runs(find_runs([5, *chunk], [index])) == [(0, 1, 0, 40)]


def test_an_earlier_index_wins_and_leaves_the_rest() -> None:
    document = ids(1, 100)
    first, second = memory(document[40:60]), memory(document)
    found = find_runs(document, [first, second])
    assert [(each.index, each.runs) for each in found] == [
        (1, (Run(0, 0, 40),)), (0, (Run(40, 0, 20),)), (1, (Run(60, 60, 100),)),
    ]  # fmt: skip


def test_namespaces_and_fingerprints_never_meet(tmp_path: Path) -> None:
    chunk = ids(1, 40)
    index = Index(tmp_path, Files(), SECRET)
    with index.keep(entry(0, chunk, namespace="one")):
        pass
    assert runs(find_runs(chunk, [IndexedChunks(index, "one", DIGEST)])) == [(0, 0, 0, 40)]
    for namespace, digest in (("", DIGEST), ("two", DIGEST), ("one", "e" * 32)):
        assert find_runs(chunk, [IndexedChunks(index, namespace, digest)]) == []
    hashes = Windows(SECRET, "one", DIGEST).pick(np.asarray(chunk, np.int32))[0].tolist()
    assert IndexedChunks(index, "one", DIGEST).find(hashes)[0]
    assert not IndexedChunks(index, "two", DIGEST).find(hashes)[0]
    others = Windows(SECRET, "two", DIGEST).pick(np.asarray(chunk, np.int32))[0].tolist()
    assert set(hashes).isdisjoint(others)


def test_what_is_deleted_is_not_found(tmp_path: Path) -> None:
    chunks = [ids(1, 40), ids(2, 40)]
    index = Index(tmp_path, Files(), SECRET)
    for number, chunk in enumerate(chunks):
        with index.keep(entry(number, chunk)):
            pass
    index.delete("", [f"{0:032x}"])
    known = IndexedChunks(index, "", DIGEST)
    assert runs(find_runs([*chunks[0], *chunks[1]], [known])) == [(1, 40, 0, 40)]
    orphans = "SELECT count(*) FROM windows WHERE chunk NOT IN (SELECT id FROM texts)"
    assert index.rows(orphans) == [(0,)]
    of_memory = memory(*chunks)
    of_memory.remove(f"{0:032x}")
    assert runs(find_runs([*chunks[0], *chunks[1]], [of_memory])) == [(1, 40, 0, 40)]
    of_memory.remove(f"{1:032x}")
    assert find_runs([*chunks[0], *chunks[1]], [of_memory]) == []


def test_damaged_rows_are_made_anew(tmp_path: Path) -> None:
    chunk = ids(1, 40)
    index = Index(tmp_path, Files(entry(0, chunk)), SECRET)
    with index.transaction(writes=True) as connection:
        connection.execute("UPDATE texts SET ids = x'0102'")
    known = IndexedChunks(index, "", DIGEST)
    with pytest.raises(StoreError, match="made anew"):
        find_runs(chunk, [known])
    assert runs(find_runs(chunk, [known])) == [(0, 0, 0, 40)]
