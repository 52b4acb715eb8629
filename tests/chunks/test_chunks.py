"""The way from texts to caches, with others on it at the same time, and where it is blocked."""

from __future__ import annotations

from functools import partial
from unicodedata import normalize

import pytest

from samkv_integrations import Engine, MemoryStore
from samkv_integrations.errors import InvalidOption
from samkv_integrations.store.windows import MIN_RUN
from tests.support.models import tiny_model

TEXT = "the mill of number one is at the mill, and it grinds"


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
    computed = partial(engine.chunks.compute_for, since=0, pause=lambda: None)
    assert engine.scheduler.run(lambda _: computed({ids: forged})) == {}
    assert not engine.store.contains(engine.store.key(engine.fingerprint, ids), engine.fingerprint)
    assert list(engine.scheduler.run(lambda _: computed({ids: true}))) == [ids]


def test_a_chunk_that_no_prompt_will_find_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(tiny_model("llama"))
    n_tokens = len(engine.model.tokenize(TEXT, special=False))
    assert n_tokens >= MIN_RUN
    engine.cache_chunks([TEXT])
    assert caplog.messages == []
    engine.cache_chunks(["# Prices", "# Times"])
    (told,) = caplog.messages
    assert f"at least {MIN_RUN}" in told and "make longer chunks" in told
    assert engine.found_in("# Prices and # Times") == []


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
            patch.setattr(engine.model, "prefill", lambda *args: computed.append(args))
            engine.cache_chunks(texts)
        assert computed == []
        assert engine.forget(texts[:1]) == 1
        assert not any(engine.found_in(f"Lis: {text}. Et?") for text in texts)
