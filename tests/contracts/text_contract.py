"""How every `Store` finds texts. A test module makes a subclass for each kind of store."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from samkv_integrations.cache.bare import LOOKUP_CHARS, bare_form
from samkv_integrations.cache.base import MAX_ALIKE, MAX_STEPS, Store
from tests.contracts.store_contract import TINY, chunk_for

OTHER = replace(TINY, block_size=8)
HEAD = "This is how all of them begin: "
assert len(HEAD) > LOOKUP_CHARS


def put(store: Store, seed: int, text: str, fingerprint: Any = TINY) -> str:
    """Store a chunk of that text; its key."""
    chunk = replace(chunk_for(store, seed, 5, fingerprint), text=text)
    store.put(chunk)
    return chunk.key


def like(store: Store, text: str, fingerprint: Any = TINY) -> list[tuple[str, list[str]]]:
    return list(store.texts_like(fingerprint, bare_form(text)[0]))


def heads(store: Store, fingerprint: Any = TINY) -> set[str]:
    found = store.beginnings(fingerprint)
    assert found.is_all
    return set(found.heads)


class TextContract:
    """Subclasses override ``make``: a function namespace -> a store in one place for all of them.

    What is put through one of them the others see, if their namespace is the same.
    """

    @pytest.fixture
    def make(self) -> Callable[..., Store]:
        raise NotImplementedError

    @pytest.fixture
    def store(self, make: Callable[..., Store]) -> Store:
        return make()

    def test_the_longest_that_a_text_begins_with_comes_first(self, store: Store) -> None:
        ends = ["", "a", "a b", "a b c d", "a c", "b", "a b d"]
        for seed, end in enumerate(ends):
            put(store, seed, f"{HEAD}{end}")
        found = [form for form, _ in like(store, f"{HEAD}a b c")]
        assert found == [f"{HEAD}a b", f"{HEAD}a", HEAD.strip()]
        assert like(store, "Something else that nobody has ever stored") == []
        assert like(store, HEAD[: LOOKUP_CHARS - 1]) == like(store, "") == []
        assert heads(store) == {HEAD[:LOOKUP_CHARS]}
        assert store.beginnings(TINY).longest >= len(f"{HEAD}a b c d")

    def test_bodies_with_one_bare_form(self, store: Store) -> None:
        bodies = [f"{HEAD}one\ntwo", f"{HEAD}one  two", f"{HEAD}one two\\"]
        for seed, body in enumerate(bodies):
            put(store, seed, f"\n{body}\n")
        ((form, found),) = like(store, f"{HEAD}one two three")
        assert form == f"{HEAD}one two" and sorted(found) == sorted(bodies)

    def test_only_so_many_of_them(self, store: Store) -> None:
        for number in range(MAX_ALIKE + 9):
            put(store, number, f"{HEAD}one {' ' * number}two")
        ((_, found),) = like(store, f"{HEAD}one two")
        assert len(found) == MAX_ALIKE

    def test_texts_that_were_made_to_take_long_are_given_up(self, store: Store) -> None:
        """Each sorts before what is asked for, and has a character less in common with it."""
        key = put(store, 0, HEAD)
        for length in range(MAX_STEPS // 2):
            store.put_text(key, TINY, f"{HEAD}{'b' * length}a")
        asked = f"{HEAD}{'b' * 9 * MAX_STEPS}"
        assert [form for form, _ in like(store, asked)] == [HEAD.strip()]
        for length in range(MAX_STEPS + 9):
            store.put_text(key, TINY, f"{HEAD}{'b' * length}a")
        assert like(store, asked) == []

    def test_versions_of_a_text_that_grows(self, store: Store) -> None:
        key = put(store, 0, HEAD)
        for length in range(MAX_STEPS + 9):
            store.put_text(key, TINY, f"{HEAD}{'b' * length}")
        found = [form for form, _ in like(store, f"{HEAD}bbbbb and more")]
        assert found == [f"{HEAD}{'b' * length}".strip() for length in range(5, -1, -1)]

    def test_only_what_came_since_is_listed(self, store: Store) -> None:
        empty = store.beginnings(TINY)
        assert (empty.heads, empty.longest, empty.is_all) == ([], 0, True)
        put(store, 1, f"one {HEAD}")
        first = store.beginnings(TINY, empty.cursor)
        assert (first.heads, first.is_all) == ([f"one {HEAD}"[:LOOKUP_CHARS]], False)
        again = store.beginnings(TINY, first.cursor)
        assert (again.heads, again.is_all) == ([], False)
        assert again.longest >= len(f"one {HEAD}".strip())
        put(store, 2, "too short")
        put(store, 3, f"two {HEAD}, and more of it")
        second = store.beginnings(TINY, again.cursor)
        assert (second.heads, second.is_all) == ([f"two {HEAD}"[:LOOKUP_CHARS]], False)
        assert second.longest >= len(f"two {HEAD}, and more of it")
        assert len(heads(store)) == 2

    @pytest.mark.parametrize("how", ["delete", "forget"])
    def test_what_is_deleted_is_gone_and_all_is_listed_anew(self, store: Store, how: str) -> None:
        put(store, 1, f"one {HEAD}")
        key = put(store, 2, f"two {HEAD}")
        before = store.beginnings(TINY)
        if how == "delete":
            assert store.delete(key, key, "0" * 32) == 1
        else:
            assert store.forget({f"two {HEAD}".strip()}.__contains__) == 1
        after = store.beginnings(TINY, before.cursor)
        assert (after.heads, after.is_all) == ([f"one {HEAD}"[:LOOKUP_CHARS]], True)
        assert like(store, f"two {HEAD}") == []
        put(store, 2, f"two {HEAD}")
        assert heads(store) == {f"{name} {HEAD}"[:LOOKUP_CHARS] for name in ("one", "two")}

    def test_several_are_deleted_at_once(self, store: Store) -> None:
        keys = [put(store, seed, f"{seed} {HEAD}") for seed in range(4)]
        assert store.delete(*keys[:3]) == 3
        assert store.delete() == store.delete(*keys[:3]) == 0
        assert heads(store) == {f"3 {HEAD}"[:LOOKUP_CHARS]}

    def test_a_text_of_two_chunks_stays_with_either(self, store: Store) -> None:
        keys = [put(store, seed, HEAD) for seed in range(2)]
        for key in keys:
            assert [form for form, _ in like(store, HEAD)] == [HEAD.strip()]
            store.delete(key)
        assert like(store, HEAD) == [] and heads(store) == set()

    def test_two_texts_of_one_chunk(self, store: Store) -> None:
        """Composed and decomposed letters: some tokenizers make the same tokens of them."""
        texts = [unicodedata.normalize(form, f"{HEAD}où est le café?") for form in ("NFC", "NFD")]
        key = put(store, 1, texts[0])
        store.put_text(key, TINY, texts[1])
        store.put_text(key, TINY, texts[1])
        for text in texts:
            assert like(store, text) == [(text, [text])]
        assert store.text(key) in texts and store.keys() == [key]
        assert store.delete(key) == 1
        assert [like(store, text) for text in texts] == [[], []] and heads(store) == set()

    def test_half_a_character(self, store: Store) -> None:
        texts = [f"{HEAD}\ud83d", f"{HEAD}\ud83d\ude00 and more", f"{HEAD}😀", f"{HEAD}\udfff"]
        for seed, text in enumerate(texts):
            put(store, seed, text)
        for text in (texts[0], texts[2], texts[3]):
            assert (text, [text]) in like(store, f"{text} and so on")
        put(store, 9, "\udc00" * LOOKUP_CHARS)
        assert "\udc00" * LOOKUP_CHARS in heads(store)

    def test_other_fingerprints_have_other_texts(self, store: Store) -> None:
        put(store, 1, f"one {HEAD}")
        put(store, 1, f"two {HEAD}", OTHER)
        assert heads(store) == {f"one {HEAD}"[:LOOKUP_CHARS]}
        assert heads(store, OTHER) == {f"two {HEAD}"[:LOOKUP_CHARS]}
        assert like(store, f"two {HEAD}") == like(store, f"one {HEAD}", OTHER) == []

    def test_namespaces_never_see_each_others_texts(self, make: Callable[..., Store]) -> None:
        one, other = make(namespace="one"), make(namespace="other")
        cursor = other.beginnings(TINY).cursor
        key = put(one, 1, f"{HEAD}of one")
        put(other, 1, f"other {HEAD}")
        put(other, 2, f"{HEAD}")
        assert set(other.beginnings(TINY, cursor).heads) == heads(other)
        assert f"{HEAD}of one" not in [form for form, _ in like(other, f"{HEAD}of one and more")]
        assert heads(one) == {HEAD[:LOOKUP_CHARS]}
        assert other.text(key) is None and other.delete(key) == 0
        assert other.beginnings(TINY).longest < len(f"other {HEAD}of one")
        assert like(one, f"{HEAD}of one") == [(f"{HEAD}of one", [f"{HEAD}of one"])]
