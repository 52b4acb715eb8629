"""The way from texts to caches, with others on it at the same time, and where it is blocked."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest

import samkv_integrations.engine.chunks as module
from samkv_integrations import ChunkStore, Engine, MemoryStore
from samkv_integrations.cache.attention_stats import MIN_CHUNKS
from samkv_integrations.cache.chunk import ChunkCache
from samkv_integrations.errors import ChunkNotCached, InvalidOption, StoreError
from samkv_integrations.prompt.rag_template import rag_prompt
from tests.support.models import tiny_model

TEXT = "the mill of number one is at the mill, and it grinds"


def test_keys_follow_a_block_size_that_was_settled_meanwhile(tmp_path: Path) -> None:
    """Another process computed the first chunk after these were named, and before they agreed."""
    first, second = (Engine(tiny_model(), ChunkStore(tmp_path)) for _ in range(2))
    long = "w" * 2000
    named = first.chunks.refer([long])
    second.cache_chunks(["short"])
    assert first.fingerprint.block_size == second.fingerprint.block_size
    (agreed,) = first.chunks.agree(named)
    assert agreed.key != named[0].key
    assert agreed.key == first.key_of(long) == second.key_of(long)


def test_stable_layers_go_by_all_chunks_also_if_somebody_asked_while_they_were_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(tiny_model(), MemoryStore())
    n_votes: list[int | None] = []

    def counted(n_layers: int, votes: Any) -> tuple[int, ...]:
        n_votes.append(None if votes is None else len(votes))
        return (0,)

    put = engine.store.put

    def asking(chunk: ChunkCache) -> None:
        assert engine.stable_layers == (0,)
        put(chunk)

    monkeypatch.setattr(module, "stable_layers", counted)
    monkeypatch.setattr(engine.store, "put", asking)
    texts = [f"{TEXT} {number}" for number in range(MIN_CHUNKS)]
    engine.cache_chunks(texts)
    assert n_votes[0] is None  # asked when there was none
    assert engine.stable_layers == (0,)
    assert n_votes[-1] == MIN_CHUNKS


def test_a_store_that_is_gone_leaves_misses(tmp_path: Path) -> None:
    engine = Engine(tiny_model(), ChunkStore(tmp_path / "kv"))
    shutil.rmtree(tmp_path / "kv")
    engine.announce([TEXT])
    engine.announce([TEXT], "compute")
    with pytest.raises(ChunkNotCached):
        engine.announce([TEXT], "error")


def test_a_full_disk_leaves_a_miss_to_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny_model(), MemoryStore())

    def full(*arguments: object, **options: object) -> None:
        raise StoreError("No space left")

    monkeypatch.setattr(engine.store, "put", full)
    fetched: list[str] = []
    monkeypatch.setattr(engine.store, "prefetch", lambda key, _: fetched.append(key))
    engine.announce([TEXT], "compute")
    assert fetched == [engine.key_of(TEXT)] and not engine.is_cached(TEXT)
    with pytest.raises(StoreError, match="No space left"):
        engine.cache_chunks([TEXT])


def test_a_chunk_inside_a_handle_does_not_occur() -> None:
    engine = Engine(tiny_model(), MemoryStore())
    engine.cache_chunks([TEXT])
    handle = engine.issue_handle(TEXT)
    assert handle is not None
    with pytest.raises(InvalidOption, match="does not occur in the prompt"):
        engine.generate(f"Read {handle}. Q?", [handle[9:20]], max_new_tokens=1)
    assert engine.found_in(f"Read {handle} and {TEXT}.") == [TEXT]
    assert engine.found_in(f"Read {handle}.") == [TEXT]


def test_a_text_of_other_tokens_is_not_computed() -> None:
    """The store's index says what a missed chunk's text is, and anyone may have written there."""
    engine = Engine(tiny_model("llama"))
    true, forged = "What the chunk says.", "What somebody else says."
    ids = tuple(engine.model.tokenize(true, special=False))
    computed = partial(engine.chunks.compute_for, since=0)
    assert engine.scheduler.run(lambda: computed({ids: forged})) == {}
    assert not engine.store.contains(engine.store.key(engine.fingerprint, ids), engine.fingerprint)
    assert list(engine.scheduler.run(lambda: computed({ids: true}))) == [ids]


def test_what_is_no_store_and_no_list_is_named() -> None:
    with pytest.raises(InvalidOption, match=r"store='kv' is no store; give ChunkStore\('kv'\)"):
        Engine(tiny_model(), "kv")  # type: ignore[arg-type]
    engine = Engine(tiny_model(), MemoryStore())
    for call in (engine.announce, engine.expect, lambda text: rag_prompt("Q?", text)):
        with pytest.raises(InvalidOption, match="put it into a list"):
            call(TEXT)


class TestTexts:
    """A cache is found in prompts by its token ids, which several texts may have."""

    @pytest.fixture
    def engine(self, monkeypatch: pytest.MonkeyPatch) -> Engine:
        """Its tokenizer makes the same tokens of composed and decomposed letters."""
        engine = Engine(tiny_model(), MemoryStore(), block_size=8)
        tokenize = engine.model.tokenize
        monkeypatch.setattr(
            engine.model,
            "tokenize",
            lambda text, *, special: tokenize(normalize("NFC", text), special=special),
        )
        return engine

    BOTH = [normalize(form, "le café où le thé est servi à midi") for form in ("NFC", "NFD")]

    @pytest.mark.parametrize("at_once", [True, False])
    @pytest.mark.parametrize("order", [1, -1])
    def test_two_texts_of_one_chunk_are_both_found(
        self, engine: Engine, at_once: bool, order: int
    ) -> None:
        """The one that was stored last was, and the other never."""
        texts = self.BOTH[::order]
        for part in [texts] if at_once else [[text] for text in texts]:
            engine.cache_chunks(part)
        assert len(engine.store.keys()) == 1
        for text in texts:
            (found,) = engine.found_in(f"Lis: {text}. Et?")
            assert normalize("NFC", found) == self.BOTH[0]
        computed = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "prefill", lambda *args: computed.append(args))
            engine.cache_chunks(texts)
        assert computed == []
        assert engine.forget(texts[:1]) == 1
        assert not any(engine.found_in(f"Lis: {text}. Et?") for text in texts)
