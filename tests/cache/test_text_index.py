"""Texts are found by how they begin, in every kind of store, and in a bounded number of steps."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import samkv_integrations.cache.text_index as module
from samkv_integrations.cache.base import Store
from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.cache.memory import MemoryStore
from samkv_integrations.cache.text_index import TextIndex
from tests.contracts.text_contract import HEAD, TextContract, like, put


class TestMemoryStore(TextContract):
    @pytest.fixture
    def make(self) -> Callable[..., Store]:
        return MemoryStore


class TestChunkStore(TextContract):
    @pytest.fixture
    def make(self, tmp_path: Path) -> Callable[..., Store]:
        return lambda **options: ChunkStore(tmp_path / "kv", **options)


@given(
    ends=st.lists(st.text("aé😀", max_size=5), max_size=12),
    asked=st.text("aé😀", max_size=7),
    deleted=st.sets(st.integers(0, 11)),
    is_on_disk=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_against_a_plain_search(
    ends: list[str], asked: str, deleted: set[int], is_on_disk: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = ChunkStore(folder) if is_on_disk else MemoryStore()
        keys = [put(store, seed, f"{HEAD}-{end}") for seed, end in enumerate(ends)]
        store.delete(*(keys[at] for at in deleted if at < len(keys)))
        left = {f"{HEAD}-{end}" for at, end in enumerate(ends) if at not in deleted}
        expected = sorted(filter(f"{HEAD}-{asked}".startswith, left), key=len, reverse=True)
        found = [(form, set(bodies)) for form, bodies in like(store, f"{HEAD}-{asked}")]
        assert found == [(form, {form}) for form in expected]


def index_of(*texts: str) -> TextIndex:
    index = TextIndex()
    for text in texts:
        index.add(text, "a source")
    return index


def test_a_step_is_made_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    index, n_steps, bisect = index_of(HEAD, f"{HEAD}a", f"{HEAD}ab"), 0, module.bisect_right

    def counted(*args: object) -> int:
        nonlocal n_steps
        n_steps += 1
        return bisect(*args)  # type: ignore[call-overload]

    monkeypatch.setattr(module, "bisect_right", counted)
    found = index.texts_like(f"{HEAD}abc")
    assert n_steps == 0
    assert next(found)[0] == f"{HEAD}ab" and n_steps == 1
    assert [form for form, _ in found] == [f"{HEAD}a", HEAD.strip()]


def test_a_cursor_of_another_index_is_none() -> None:
    one, other = index_of(HEAD), index_of(f"other {HEAD}")
    for cursor in (one.beginnings().cursor, "nonsense", 3):
        assert other.beginnings(cursor).is_all
        assert len(other.beginnings(cursor).heads) == 1


def test_the_longest_that_is_left() -> None:
    index = index_of(HEAD, f"{HEAD}and more")
    assert index.beginnings().longest == len(f"{HEAD}and more")
    index.remove(f"{HEAD}and more", "another source")
    assert index.beginnings().longest == len(f"{HEAD}and more")
    index.remove(f"{HEAD}and more", "a source")
    assert index.beginnings().longest == len(HEAD.strip())
    index.remove("what is not there, nor ever was", "a source")


def test_many_threads() -> None:
    index, failures = TextIndex(), []
    bodies = [f"{HEAD}{number}" for number in range(60)]

    def change(part: list[str]) -> None:
        for _ in range(3):
            for body in part:
                index.add(body, "a source")
            for body in part:
                index.remove(body, "a source")
        for body in part:
            index.add(body, "a source")

    def look() -> None:
        cursor = None
        for number in range(200):
            cursor = index.beginnings(cursor).cursor
            for form, found in index.texts_like(f"{bodies[number % 60]} and more"):
                if found != [form]:
                    failures.append((form, found))

    work = [threading.Thread(target=change, args=(bodies[i::4],)) for i in range(4)]
    work += [threading.Thread(target=look) for _ in range(4)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert [item for item in failures if item[1]] == []
    for body in bodies:
        assert (body, [body]) in list(index.texts_like(body))
